"""Scans of scenes that the processes of a machine share, and that later starts find."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np
import pytest
from geo_scenes import write_mosaic, write_raster
from geotiff_data import build_dataset
from ranks import run_ranks
from support import PATIENT

from mapsage.datasets.geotiff import shared_scan
from mapsage.datasets.geotiff.shared_scan import cache_folder, scan_scenes
from mapsage.geo import Raster

Process = multiprocessing.get_context('fork').Process


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Any) -> Path:
    """An empty folder of results, and one for locks."""
    (tmp_path / 'locks').mkdir()
    monkeypatch.setattr(shared_scan, 'gettempdir', lambda: str(tmp_path / 'locks'))
    monkeypatch.setenv('MAPSAGE_SCENE_CACHE', str(tmp_path / 'kept'))
    return tmp_path / 'kept'


def write_scenes(root: Path, count: int = 4) -> List[Path]:
    """Write float scenes of four windows of 64 pixels, each with one window without data."""
    paths = []
    for number in range(count):
        values = np.full((2, 128, 128), float(number), 'float32')
        values[:, :64, 64:] = np.nan
        paths.append(write_raster(root / f'scenes/{number}.tif', values))
    return paths


def scan(scene: Raster) -> np.ndarray:
    return scene.read(0, 0, 2, 2)[0][0].astype(np.int32)


def never(scene: Raster) -> np.ndarray:
    raise AssertionError(f'{scene.path} is scanned again')


def _build_on_a_rank(root: str) -> Tuple[int, List[Any]]:
    """Build a training and a validation dataset; return the scenes read, and their windows."""
    read = []
    original = Raster.read_reduced

    def read_reduced(self: Raster, *arguments: Any, **more: Any) -> Any:
        read.append(self.path)
        time.sleep(0.05)  # so that the ranks meet
        return original(self, *arguments, **more)

    Raster.read_reduced = read_reduced  # type: ignore[method-assign]
    datasets = [build_dataset(Path(root), window=64, labels=None) for _ in range(2)]
    return len(set(read)), [
        [each.get_data_info(i)['window'] for i in range(len(each))] for each in datasets
    ]


@pytest.mark.parametrize('scenes', [1, 4])
def test_ranks_divide_the_scenes(tmp_path: Path, scenes: int) -> None:
    write_scenes(tmp_path, scenes)
    found = run_ranks(_build_on_a_rank, 3, tmp_path / 'ranks', str(tmp_path))
    assert sum(count for count, _ in found) == scenes
    expected = [(0, 0, 64), (0, 64, 64), (64, 64, 64)] * scenes
    assert all(windows == [expected, expected] for _, windows in found)
    again = run_ranks(_build_on_a_rank, 1, tmp_path / 'again', str(tmp_path))
    assert again == [(0, [expected, expected])]


def test_a_scene_that_changes_is_scanned_again(tmp_path: Path) -> None:
    first, second = write_scenes(tmp_path, 2)
    mosaic = write_mosaic(tmp_path / 'mosaic.vrt', [first, second])
    scenes = [Raster(mosaic), Raster(second)]
    assert [each[0, 0] for each in scan_scenes(scenes, (1,), scan)] == [0, 1]
    assert [each[0, 0] for each in scan_scenes(scenes, (1,), never)] == [0, 1]
    assert scan_scenes(scenes, (2,), lambda _: np.full(1, 9)) == [9, 9]
    assert scan_scenes([Raster(second, [2])], (1,), lambda _: np.full(1, 5)) == [5]
    write_raster(first, np.full((2, 128, 128), 7.0, 'float32'))  # a source of the mosaic
    assert [each[0, 0] for each in scan_scenes([Raster(mosaic)], (1,), scan)] == [7]
    scan_scenes(scenes[1:], (1,), never)
    assert not list((tmp_path / 'locks').iterdir())


def test_settings_of_one_scene_concern_no_other(tmp_path: Path) -> None:
    scenes, read = [Raster(path) for path in write_scenes(tmp_path, 3)], []

    def read_and_scan(scene: Raster) -> np.ndarray:
        read.append(scene.path)
        return scan(scene)

    for settings in ('abc', 'abc', 'abd'):
        results = scan_scenes(scenes, (), read_and_scan, list(settings))
        assert [result[0, 0] for result in results] == [0, 1, 2]
    assert read == [scene.path for scene in (*scenes, scenes[2])]


def test_free_memory_is_returned_between_scans_but_not_for_cached_ones(
    tmp_path: Path, monkeypatch: Any
) -> None:
    scenes = [Raster(path) for path in write_scenes(tmp_path, 17)]
    scanned: List[str] = []
    returned: List[int] = []

    def count_and_scan(scene: Raster) -> np.ndarray:
        scanned.append(scene.path)
        return scan(scene)

    monkeypatch.setattr(shared_scan, 'return_free_memory', lambda: returned.append(len(scanned)))
    for _ in range(2):
        scan_scenes(scenes, (), count_and_scan)
        assert returned == [8, 16]


def test_a_damaged_result_is_replaced(tmp_path: Path, folder: Path) -> None:
    scenes = [Raster(path) for path in write_scenes(tmp_path, 1)]
    scan_scenes(scenes, (), scan)
    (kept,) = folder.iterdir()
    for content in (b'', kept.read_bytes()[:-3], b'nonsense'):
        kept.write_bytes(content)
        assert scan_scenes(scenes, (), scan)[0][0, 0] == 0
        scan_scenes(scenes, (), never)


def _hold(path: str, started: Any) -> None:
    def stuck(scene: Raster) -> np.ndarray:
        started.set()
        time.sleep(PATIENT)
        raise AssertionError

    scan_scenes([Raster(path)], (), stuck)


def test_a_process_that_dies_or_hangs_blocks_nobody(tmp_path: Path, monkeypatch: Any) -> None:
    (path,) = write_scenes(tmp_path, 1)
    started = multiprocessing.get_context('fork').Event()
    holder = Process(target=_hold, args=(str(path), started))
    holder.start()
    try:
        assert started.wait(PATIENT)
        monkeypatch.setattr(shared_scan, '_PATIENCE', 0.2)
        assert scan_scenes([Raster(path)], (), scan)[0][0, 0] == 0  # it hangs
        os.unlink(str(next((tmp_path / 'kept').iterdir())))
        monkeypatch.setattr(shared_scan, '_PATIENCE', PATIENT)
        monkeypatch.setattr(shared_scan.time, 'sleep', lambda _: holder.kill())
        assert scan_scenes([Raster(path)], (), scan)[0][0, 0] == 0  # it is killed meanwhile
        assert not holder.is_alive() or holder.join() is None
    finally:
        holder.kill()
        holder.join()


def test_the_scan_of_another_process_is_waited_for(tmp_path: Path, monkeypatch: Any) -> None:
    (path,) = write_scenes(tmp_path, 1)
    entry = shared_scan._entry(cache_folder(), Raster(path), '[]', None)  # type: ignore[arg-type]
    other = contextlib.ExitStack()

    def other_is_done(_: float) -> None:
        np.save(entry, np.full((1, 1), 3))  # type: ignore[arg-type]
        other.close()

    monkeypatch.setattr(shared_scan.time, 'sleep', other_is_done)
    with other:
        assert other.enter_context(shared_scan._scan_lock(entry))
        assert scan_scenes([Raster(path)], (), never)[0] == 3


def test_an_error_of_a_scan_frees_the_scene(tmp_path: Path) -> None:
    (path,) = write_scenes(tmp_path, 1)
    with pytest.raises(AssertionError, match='again'):
        scan_scenes([Raster(path)], (), never)
    assert scan_scenes([Raster(path)], (), scan)[0][0, 0] == 0


def test_where_nothing_can_be_written(tmp_path: Path, monkeypatch: Any) -> None:
    (path,) = write_scenes(tmp_path, 1)
    (tmp_path / 'file').write_text('no folder')
    monkeypatch.setenv('MAPSAGE_SCENE_CACHE', str(tmp_path / 'file/kept'))
    assert cache_folder() == tmp_path / f'locks/mapsage-{os.getuid()}'  # of temporary files
    scan_scenes([Raster(path)], (), scan)
    scan_scenes([Raster(path)], (), never)
    monkeypatch.setattr(shared_scan, 'gettempdir', lambda: str(tmp_path / 'file'))
    assert cache_folder() is None
    assert scan_scenes([Raster(path)], (), scan)[0][0, 0] == 0
    monkeypatch.setenv('MAPSAGE_SCENE_CACHE', str(tmp_path / 'kept'))  # results, but no locks
    scan_scenes([Raster(path)], (), scan)
    scan_scenes([Raster(path)], (), never)
    monkeypatch.setattr(shared_scan, 'atomic_write', _full_disk)
    assert scan_scenes([Raster(path)], ('new',), scan)[0][0, 0] == 0


def _full_disk(*_: Any) -> None:
    raise OSError(28, 'No space left on device')


def test_the_users_cache_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv('MAPSAGE_SCENE_CACHE')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    assert cache_folder() == tmp_path / 'cache/mapsage/scenes'
