"""Folders of fast copies: shared by processes, bounded, and never trusted half written."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
from geo_scenes import write_raster
from geotiff_data import build_dataset, load_window, write_scene
from support import PATIENT

from mapsage.base import progress
from mapsage.base.errors import UserError
from mapsage.base.folder_claims import claimed
from mapsage.datasets.geotiff import fast_copies
from mapsage.datasets.geotiff.fast_copies import FastCopies, FastCopyError
from mapsage.extras.demo import prepare_data
from mapsage.geo import Raster, match

FORK = multiprocessing.get_context('fork')


@pytest.fixture(autouse=True)
def no_copies_in_use(monkeypatch: Any) -> None:
    """Forget at the end of a test that this process uses copies."""
    monkeypatch.setattr(fast_copies, '_in_use', {})


@pytest.fixture
def scenes(tmp_path: Path) -> List[str]:
    """Return the paths of three scenes of 300 x 260 pixels."""
    random = np.random.RandomState(0)
    return [
        str(
            write_raster(
                tmp_path / f'scenes/{name}.tif',
                random.randint(0, 255, (3, 260, 300)).astype('uint8'),
            )
        )
        for name in 'abc'
    ]


def names_in(folder: Path) -> List[str]:
    """Return the names of the copies in a folder, and of what should not be left there."""
    return sorted(path.name for path in folder.iterdir() if path.name != '.in-use')


def in_a_fork(action: Any, *arguments: Any) -> Any:
    """Call a function in a forked process; return its result, or the text of its error."""
    results = FORK.SimpleQueue()

    def call() -> None:
        try:
            results.put(action(*arguments))
        except UserError as error:
            results.put(str(error))

    process = FORK.Process(target=call)
    process.start()
    process.join(PATIENT)
    assert process.exitcode == 0
    return results.get()


def test_copies_are_made_once(tmp_path: Path, scenes: List[str]) -> None:
    copies, lines = FastCopies(str(tmp_path / 'fast')), []
    report = copies.make(scenes + scenes, lines.append)
    assert report.written == 3 and sorted(report.copies) == scenes and not report.originals
    assert lines and lines[0].startswith('3 fast copies are made in ')
    for source, copy in report.copies.items():
        assert Path(copy).name == Path(source).name
        assert (
            Raster(copy).read(0, 0, 300, 260)[0].tobytes()
            == Raster(source).read(0, 0, 300, 260)[0].tobytes()
        )
    again = copies.make(scenes, lines.append)
    assert again.written == 0 and again.copies == report.copies and len(lines) == 1
    assert len(names_in(tmp_path / 'fast')) == 3


def test_a_source_that_changes_gets_a_new_copy(tmp_path: Path, scenes: List[str]) -> None:
    copies = FastCopies(str(tmp_path / 'fast'))
    before = copies.make(scenes).copies
    write_raster(Path(scenes[1]), np.zeros((3, 260, 300), 'uint8'))
    # A run that has begun with the old copy keeps it, since it holds the folder's lock.
    assert in_a_fork(lambda: copies.make(scenes).dropped) == 0
    assert os.path.exists(before[scenes[1]])
    os.close(fast_copies._in_use.pop(copies.folder))
    report = copies.make(scenes[:1])  # whichever scenes the next run reads
    assert report.dropped == 1 and report.written == 0
    assert not os.path.exists(before[scenes[1]]) and os.path.exists(before[scenes[0]])
    after = copies.make(scenes).copies
    assert after[scenes[1]] != before[scenes[1]] and after[scenes[0]] == before[scenes[0]]
    assert not Raster(after[scenes[1]]).read(0, 0, 300, 260)[0].any()
    assert len(names_in(tmp_path / 'fast')) == 3


def test_a_source_that_changes_while_it_is_copied(
    tmp_path: Path, scenes: List[str], monkeypatch: Any
) -> None:
    original = fast_copies.write_fast_copy

    def change_and_copy(source: str, *arguments: Any) -> None:
        original(source, *arguments)
        write_raster(Path(source), np.zeros((3, 260, 300), 'uint8'))

    monkeypatch.setattr(fast_copies, 'write_fast_copy', change_and_copy)
    with pytest.raises(FastCopyError, match='a.tif changed while it was copied'):
        FastCopies(str(tmp_path / 'fast')).make(scenes)
    assert names_in(tmp_path / 'fast') == []


def test_copies_that_do_not_fit_are_refused_before_one_is_written(
    tmp_path: Path, scenes: List[str], monkeypatch: Any
) -> None:
    folder = tmp_path / 'fast'
    with pytest.raises(
        FastCopyError,
        match=r'3 fast copies need about 7\d\d,\d{3} bytes, .* more '
        r"than max_size = 300,000 bytes.*max_size='1G'.*Nothing was written",
    ):
        FastCopies(str(folder), '300K').make(scenes)
    assert names_in(folder) == []
    FastCopies(str(folder), '0.5M').make(scenes[:1])
    with pytest.raises(FastCopyError, match=r'2 fast copies .* has 2\d\d,\d{3} bytes of others'):
        FastCopies(str(folder), '0.5M').make(scenes)
    usage = shutil.disk_usage('/')
    monkeypatch.setattr(shutil, 'disk_usage', lambda _: usage._replace(free=1000))
    with pytest.raises(FastCopyError, match='and 1,000 bytes are free .*another disk'):
        FastCopies(str(folder)).make(scenes)
    assert len(names_in(folder)) == 1
    assert FastCopies(str(folder)).make(scenes[:1]).written == 0  # what is there can be used


def test_an_estimate_that_was_too_small(
    tmp_path: Path, scenes: List[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(fast_copies, 'estimate_copy_bytes', lambda source: 1000)
    with pytest.raises(FastCopyError, match='more than estimated.*Raise max_size'):
        FastCopies(str(tmp_path / 'fast'), '300K').make(scenes)
    assert len(names_in(tmp_path / 'fast')) == 1


def _fill_the_disk(folder: str, scenes: List[str]) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100000, resource.RLIM_INFINITY))
    FastCopies(folder).make(scenes)


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, scenes: List[str]) -> None:
    error = in_a_fork(_fill_the_disk, str(tmp_path / 'fast'), scenes)
    assert 'cannot write ' in error and 'free space there or write elsewhere' in error
    assert names_in(tmp_path / 'fast') == []
    assert FastCopies(str(tmp_path / 'fast')).make(scenes).written == 3


def test_a_folder_that_cannot_be_written(tmp_path: Path, scenes: List[str]) -> None:
    (tmp_path / 'file').touch()
    # Nobody can write into the second one, root included.
    for folder in (tmp_path / 'file/fast', Path('/sys/kernel/fast')):
        with pytest.raises(FastCopyError, match=f'missing, and {folder} cannot be written'):
            FastCopies(str(folder)).make(scenes)


def test_complete_copies_can_be_read_where_nothing_can_be_written(
    tmp_path: Path, scenes: List[str], monkeypatch: Any
) -> None:
    copies = FastCopies(str(tmp_path / 'fast')).make(scenes).copies
    in_use = fast_copies._in_use.pop(tmp_path / 'fast')
    os.close(in_use)
    (tmp_path / 'fast/.in-use').unlink()
    (tmp_path / 'fast').chmod(0o555)
    original = os.open

    def read_only(path: str, flags: int, *mode: Any) -> int:
        if flags & os.O_CREAT:  # as root has any permission
            raise PermissionError(13, 'Permission denied', path)
        return original(path, flags, *mode)

    monkeypatch.setattr(os, 'open', read_only)
    assert FastCopies(str(tmp_path / 'fast')).make(scenes).copies == copies


def _make(folder: str, scenes: List[str], start: Any) -> int:
    original = fast_copies.write_fast_copy

    def slowly(*arguments: Any) -> None:
        time.sleep(0.2)  # so that the processes meet
        original(*arguments)

    fast_copies.write_fast_copy = slowly
    start.wait(PATIENT)
    return FastCopies(folder).make(scenes).written


def test_processes_divide_the_copies(tmp_path: Path, scenes: List[str]) -> None:
    start, written = FORK.Barrier(3), FORK.SimpleQueue()
    processes = [
        FORK.Process(target=lambda: written.put(_make(str(tmp_path / 'fast'), scenes, start)))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENT)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sum(written.get() for _ in processes) == 3
    assert len(names_in(tmp_path / 'fast')) == 3


def _write_slowly(folder: str, scene: str, started: Any) -> None:
    def stuck(source: str, path: Path, *_: Any) -> None:
        path.write_bytes(b'half a copy')
        started.set()
        time.sleep(PATIENT)

    fast_copies.write_fast_copy = stuck
    FastCopies(folder).make([scene])


def test_a_writer_is_waited_for_and_a_killed_one_replaced(
    tmp_path: Path, scenes: List[str], monkeypatch: Any
) -> None:
    started, lines = FORK.Event(), []
    holder = FORK.Process(target=_write_slowly, args=(str(tmp_path / 'fast'), scenes[0], started))
    holder.start()
    try:
        assert started.wait(PATIENT)
        monkeypatch.setattr(progress, '_LINE_SECONDS', 0.0)

        def kill_after_a_line(_: float) -> None:
            if any('waiting: ' in line for line in lines):
                holder.kill()
                holder.join()

        monkeypatch.setattr(fast_copies.time, 'sleep', kill_after_a_line)
        report = FastCopies(str(tmp_path / 'fast')).make(scenes[:1], lines.append)
    finally:
        holder.kill()
        holder.join()
    assert any(f'process {holder.pid} on ' in line for line in lines)
    assert report.written == 1 and Raster(report.copies[scenes[0]]).read(0, 0, 9, 9)[0].any()
    # What the killed process left is removed when copies are missing again.
    FastCopies(str(tmp_path / 'fast')).make(scenes)
    assert len(names_in(tmp_path / 'fast')) == 3


def test_a_partial_copy_of_a_running_process_stays(tmp_path: Path, scenes: List[str]) -> None:
    copies = FastCopies(str(tmp_path / 'fast'))
    wanted = copies.plan(scenes)[0]
    partial = tmp_path / 'fast' / f'.partial-{wanted[0].folder.name}-12345678'
    partial.mkdir(parents=True)
    with claimed(tmp_path / 'fast', [wanted[0].folder.name], '', job='other'):
        copies.make(scenes[1:])
        assert partial.exists()
    copies.make(scenes)
    assert not partial.exists()


def test_folders_of_others_stay(tmp_path: Path, scenes: List[str]) -> None:
    for name in ('photos', '.partial-photos', '.partial-photos-0123abcd'):
        folder = tmp_path / 'fast' / name
        folder.mkdir(parents=True)
        # A description of a source that has changed.
        (folder / 'source.json').write_text(
            json.dumps(dict(source=scenes[0], stamps=[[os.path.abspath(scenes[0]), 1, 1]]))
        )
    report = FastCopies(str(tmp_path / 'fast')).make(scenes)
    assert report.dropped == 0
    assert all(
        (tmp_path / 'fast' / name / 'source.json').exists()
        for name in ('photos', '.partial-photos', '.partial-photos-0123abcd')
    )


def test_a_copy_that_was_cut_off_is_made_again(tmp_path: Path, scenes: List[str]) -> None:
    copies = FastCopies(str(tmp_path / 'fast'))
    (path,) = copies.make(scenes[:1]).copies.values()
    content = Path(path).read_bytes()
    for damage in (content[:1000], b''):
        Path(path).write_bytes(damage)
        assert copies.make(scenes[:1]).written == 1 and Path(path).read_bytes() == content
    Path(path).with_name('source.json').write_text('[]')
    assert copies.make(scenes[:1]).written == 1
    assert len(names_in(tmp_path / 'fast')) == 1


def test_a_scene_that_cannot_be_copied_is_read_itself(
    tmp_path: Path, scenes: List[str], monkeypatch: Any
) -> None:
    mosaic = tmp_path / 'mosaic.vrt'
    band = (
        '<VRTRasterBand dataType="Byte" band="{}"><NoDataValue>{}</NoDataValue><SimpleSource>'
        '<SourceFilename relativeToVRT="1">scenes/a.tif</SourceFilename></SimpleSource>'
        '</VRTRasterBand>'
    )
    mosaic.write_text(
        '<VRTDataset rasterXSize="300" rasterYSize="260">'
        f'{band.format(1, 0)}{band.format(2, 7)}</VRTDataset>'
    )
    report = FastCopies(str(tmp_path / 'fast')).make([str(mosaic), scenes[0]])
    assert list(report.copies) == [scenes[0]]
    assert 'different no-data values' in report.originals[str(mosaic)]
    monkeypatch.setattr(fast_copies, 'stamp', lambda path: [path])
    report = FastCopies(str(tmp_path / 'other')).make(scenes[:1])
    assert report.originals == {scenes[0]: 'nothing tells when its content changes'}


@pytest.mark.parametrize(
    'config, message',
    [
        ('fast', r"expected dict\(folder='...'\)"),
        ({}, 'expected dict'),
        (dict(folder='fast', size='1G'), 'expected dict'),
        (dict(folder=3), 'expected dict'),
        (dict(folder='fast', max_size='a lot'), "max_size='a lot', expected bytes"),
        (dict(folder='fast', max_size=True), 'max_size=True'),
        (dict(folder='fast', max_size='-1G'), "max_size='-1G'"),
    ],
)
def test_settings_that_are_none(tmp_path: Path, config: Any, message: str) -> None:
    write_scene(tmp_path)
    with pytest.raises(FastCopyError, match=message):
        build_dataset(tmp_path, fast_copy=config)


@pytest.mark.parametrize(
    'size, expected',
    [(5, 5), ('5', 5), ('1.5K', 1500), ('100G', 10**11), ('2 tb', 2 * 10**12), ('3MB', 3 * 10**6)],
)
def test_sizes(size: object, expected: int) -> None:
    assert FastCopies('fast', size).max_size == expected


@pytest.mark.parametrize('windows', [None, dict(type='random', per_epoch=6, balance='classes')])
def test_samples_are_the_same_and_come_from_the_copies(tmp_path: Path, windows: Any) -> None:
    write_scene(tmp_path, nodata=11, tiled=False)
    write_scene(tmp_path, 'b', values='uint16')
    plain = build_dataset(tmp_path, windows=windows)
    fast = build_dataset(tmp_path, windows=windows, fast_copy=dict(folder=str(tmp_path / 'fast')))
    assert len(plain) == len(fast) and fast.scene_paths() == plain.scene_paths()
    # The scenes and labels have other pixels now, and the windows are those of the copies.
    samples = []
    for dataset in (plain, fast):
        np.random.seed(0)
        samples.append(
            [
                (*load_window(dataset, i), dataset.get_data_info(0).get('img_path'))
                for i in range(len(dataset))
            ]
        )
    for expected, found in zip(*samples):
        assert all(np.array_equal(*pair) for pair in zip(expected[:2], found[:2]))
    assert len(names_in(tmp_path / 'fast')) == 4  # two scenes, two label rasters


def test_the_originals_are_not_read_any_more(tmp_path: Path) -> None:
    values, classes = write_scene(tmp_path)
    dataset = build_dataset(tmp_path, fast_copy=dict(folder=str(tmp_path / 'fast')))
    for name in ('scenes/a.tif', 'labels/a.tif'):
        shutil.copy(
            str(write_raster(tmp_path / 'zero.tif', np.zeros((3, 260, 300), 'uint8'))),
            str(tmp_path / name),
        )
    image, mask = load_window(dataset, 0)
    assert np.array_equal(image, values[:, :128, :128])
    assert np.array_equal(mask, classes[:128, :128])


def test_the_command_makes_the_copies_of_a_run(tmp_path: Path, capsys: Any) -> None:
    write_scene(tmp_path)
    folder = str(tmp_path / 'fast')
    arguments = ['scenes', str(tmp_path / 'scenes'), str(tmp_path / 'labels'), '--out', folder]
    assert prepare_data.main(arguments) == 0
    assert '2 raster(s) are read from their fast copies' in capsys.readouterr().out
    copies = build_dataset(tmp_path, fast_copy=dict(folder=folder)).fast_copies
    assert copies.make(match(str(tmp_path / 'scenes'))).written == 0
    assert prepare_data.main([*arguments, '--max-size', 'x']) == 1
    assert prepare_data.main(['scenes', str(tmp_path / 'none'), '--out', folder]) == 1
    error = capsys.readouterr().err
    assert "error: max_size='x', expected bytes" in error and 'none: no such file' in error
