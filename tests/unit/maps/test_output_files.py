"""What an earlier prediction, or somebody else, left in the folder of the maps."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import damaged, documents
from hypothesis import example, given
from hypothesis import strategies as st

from mapsage.maps.errors import PredictError
from mapsage.maps.outputs import Outputs, is_done, remove_outdated
from mapsage.maps.strips import Strip, StripStore
from mapsage.maps.windows import Grid

REPORT = dict(settings=dict(input=[['a.tif', 1, 1]], window=[64, 64]), files=['a.tif', 'a.gpkg'])


def outputs_in(folder: Path) -> Outputs:
    return Outputs.of(
        folder, 'a', confidence=False, polygons=False, single_input=False, preview=False
    )


@given(documents(REPORT))
@example(json.dumps(dict(REPORT, files=['../keep'])).encode())
@example(json.dumps(dict(REPORT, files=['sub/keep'])).encode())
@example(json.dumps(dict(REPORT, files=['..', '.', '', '/etc'])).encode())
def test_any_report(tmp_path_factory: Any, content: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / 'reports'
    (folder / 'sub').mkdir(parents=True, exist_ok=True)
    kept = [folder.parent / 'keep', folder / 'sub/keep']
    for path in kept:
        path.write_text('')
    outputs = outputs_in(folder)
    outputs.report.write_bytes(content)
    try:
        is_done(outputs, REPORT['settings'])  # type: ignore[arg-type]
    except PredictError as error:
        assert 'a.' in str(error)
    remove_outdated(outputs)
    assert all(path.exists() for path in kept)


def test_a_report_removes_files_of_a_map_only(tmp_path: Path) -> None:
    names = ['thesis.txt', 'a_confidence.tif', 'b_confidence.tif', '.bashrc', 'a.tif']
    for name in names:
        (tmp_path / name).write_text('content')
    outputs = outputs_in(tmp_path)
    outputs.report.write_text(json.dumps(dict(settings={}, files=names)))
    remove_outdated(outputs)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        '.bashrc',
        'a.tif',
        'b_confidence.tif',
        'thesis.txt',
    ]


@given(st.data())
def test_any_strip(tmp_path_factory: Any, data: st.DataObject) -> None:
    grid = Grid(40, 50, (32, 32), 8)
    store = StripStore(tmp_path_factory.getbasetemp() / 'strips', grid, True)
    start, stop = grid.strip(0)
    plane = np.zeros((stop - start, 50), np.uint8)
    store.write(Strip(0, plane, plane, ['a line']))
    path = store._path(0)
    valid = path.read_bytes()
    head, pixels = zlib.decompress(valid).split(b'\n', 1)
    path.write_bytes(
        data.draw(
            st.one_of(
                st.binary(max_size=60),
                damaged(valid),
                documents(json.loads(head)).map(lambda text: zlib.compress(text + b'\n' + pixels)),
            )
        )
    )
    try:
        strip = store.read(0)
        assert all(isinstance(line, str) for line in strip.damage)
    except PredictError as error:
        assert 'strip000000' in str(error)


def test_a_strip_that_unpacks_into_gigabytes_is_not_unpacked(tmp_path: Path) -> None:
    grid = Grid(40, 50, (32, 32), 8)
    store = StripStore(tmp_path, grid, True)
    packer, zeros = zlib.compressobj(9), bytes(1 << 24)
    first, more = [packer.compress(zeros) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2)]
    # after a full flush, equal bytes have equal codes: 4 MB for 4 GB
    store._path(0).write_bytes(first + more * 255)
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(PredictError, match='is damaged'):
        store.read(0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10  # KiB
