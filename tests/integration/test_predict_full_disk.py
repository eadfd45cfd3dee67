"""tools/predict.py on a disk that is full: what is finished stays, and no half file has a name."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, Iterator, List, Tuple

import numpy as np
import pyogrio
import pytest
import rasterio
from color_model import paint, write_checkpoint, write_config, write_scene
from support import ROOT, Launch
from warm_python import warm_python

from mapsage.commands import predict as command
from mapsage.geo import GeoError
from mapsage.maps.errors import PredictError

UTM = dict(crs='EPSG:32633', transform=rasterio.Affine(0.5, 0, 500000, 0, -0.5, 5000000))
SIZE = 4 << 20
ALL = ('--confidence', '--probabilities', '--polygons')


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / 'disk'
    folder.mkdir()
    mounted = subprocess.run(
        ['mount', '-t', 'tmpfs', '-o', f'size={SIZE}', 'tmpfs', str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if mounted.returncode:
        pytest.skip(f'mounting a small disk needs root: {mounted.stdout!r}')
    yield folder
    subprocess.run(['umount', str(folder)], check=True)


def leave(disk: Path, free: int) -> None:
    """Fill the disk but for so many bytes."""
    ballast = disk / 'ballast'
    if ballast.exists():
        ballast.unlink()
    used = (
        SIZE
        - int(
            subprocess.run(
                ['stat', '-f', '-c', '%f', str(disk)], check=True, stdout=subprocess.PIPE
            ).stdout
        )
        * 4096
    )
    ballast.write_bytes(bytes(max(0, SIZE - used - free)))


def check_whole(out: Path, expected: Path) -> List[str]:
    """Return the names of the files of a map; each must be readable to its end and right."""
    names = sorted(path.name for path in out.glob('[!.]*'))
    for name in names:
        if name.endswith('.tif'):
            with rasterio.open(out / name) as found, rasterio.open(expected / name) as right:
                np.testing.assert_array_equal(found.read(), right.read())
        elif name.endswith('.gpkg'):
            assert len(pyogrio.raw.read(out / name)[2]) == len(pyogrio.raw.read(expected / name)[2])
        elif not name.endswith('.xml'):
            assert (out / name).read_bytes() == (expected / name).read_bytes(), name
    return names


def test_a_disk_that_fills_up_at_any_step(tmp_path: Path, disk: Path, capsys: Any) -> None:
    model = str(write_config(tmp_path)), str(write_checkpoint(tmp_path))
    classes = paint(120, 300)
    classes[::7, ::5] = np.random.RandomState(0).randint(0, 4, classes[::7, ::5].shape)
    scene = str(write_scene(tmp_path / 'field.tif', classes, **UTM))
    options = (*model, scene, *ALL, '--accelerator', 'cpu', '--out')
    assert command.main([*options, str(tmp_path / 'right')]) == 0
    stopped: List[Tuple[str, List[str]]] = []
    for free in (12 << 10, 24 << 10, 40 << 10, 104 << 10, 296 << 10, SIZE):
        leave(disk, free)
        try:
            assert command.main([*options, str(disk / 'out')]) == 0
            break
        except (PredictError, GeoError) as error:
            assert 'cannot write' in str(error) and 'ree space' in str(error)
            stopped.append((str(error), check_whole(disk / 'out', tmp_path / 'right')))
            assert 'field.json' not in stopped[-1][1]  # it would say that the map is finished
    names = check_whole(disk / 'out', tmp_path / 'right')
    assert {'field.tif', 'field.gpkg', 'field.json', 'field_probabilities.tif'} <= set(names)
    assert not [path for path in (disk / 'out').iterdir() if path.name.startswith('.')]
    # It was stopped by its plan and a strip first, and last when the map was there already.
    (plan, nothing), (strip, no_map), *_, (_, names) = stopped
    assert 'plan' in plan and 'strip' in strip and nothing == no_map == []
    assert 'field.tif' in names


def test_the_command_says_what_to_do_and_continues(tmp_path: Path, disk: Path) -> None:
    model = write_config(tmp_path), write_checkpoint(tmp_path)
    scene = write_scene(tmp_path / 'field.tif', paint(400, 90), **UTM)

    def start() -> Any:
        return Launch(
            *model,
            scene,
            '--out',
            disk / 'out',
            '--accelerator',
            'cpu',
            command=[warm_python(), 'tools/predict.py'],
            environ={'PYTHONPATH': str(ROOT / 'tests')},
        ).finish()

    leave(disk, 32 << 10)
    finished = start()
    assert finished.status == 1 and 'Traceback' not in finished.output
    assert 'No space left on device' in finished.output
    assert 'What is finished stays: the same command continues.' in finished.output
    assert list((disk / 'out').glob('[!.]*')) == []
    kept = len(list((disk / 'out').glob('.field.*/strip*')))
    (disk / 'ballast').unlink()
    finished = start()
    assert finished.status == 0 and kept > 0 and f'continues, {kept} of 8' in finished.output
    with rasterio.open(disk / 'out' / 'field.tif') as file:
        np.testing.assert_array_equal(file.read(1), paint(400, 90))
