"""Records of dynamic sampling with anything in them."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
from fuzzing import damaged, documents
from hypothesis import example, given
from hypothesis import strategies as st
from sampling_files import row, tile_arrays

from mapsage.pictures.sampling_plot import (
    SamplingPlotError,
    headline,
    merged,
    read_steps,
    read_tiles,
    series,
)

ROW = json.loads(json.dumps(row(50)))


@given(documents(ROW))
@example(b'{' * 100000)
@example(b'{"a":' * 100000)
@example(json.dumps(ROW).encode()[:40] + json.dumps(ROW).encode())
def test_any_line(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / 'steps.jsonl'
    path.write_bytes(json.dumps(ROW).encode() + b'\n' + content + b'\n')
    try:
        rows = read_steps(path)
        assert series(rows) and merged(rows, 5) and headline(rows)
    except SamplingPlotError as error:
        assert 'steps.jsonl' in str(error)


@given(st.data())
def test_any_tiles(tmp_path_factory: Any, data: st.DataObject) -> None:
    stream = io.BytesIO()
    np.savez_compressed(stream, **tile_arrays())
    path = tmp_path_factory.getbasetemp() / 'tiles.npz'
    path.write_bytes(data.draw(st.one_of(st.binary(max_size=80), damaged(stream.getvalue()))))
    try:
        read_tiles(path)
    except SamplingPlotError as error:
        assert 'tiles.npz' in str(error)
