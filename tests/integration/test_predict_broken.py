"""An input of a prediction that is lost or changes after the plan: it costs its own map only."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Callable, List, Tuple

import cv2
import numpy as np
import pytest
import rasterio
from color_model import COLORS, Unchanged, paint, write_checkpoint, write_config, write_scene
from map_runs import read
from ranks import run_ranks
from support import main_leg

from mapsage.commands import predict
from mapsage.commands.predict import PARTIAL, map_options, open_model, run_prediction
from mapsage.distributed import open_channel
from mapsage.distributed.channels.agreement import RankError
from mapsage.maps.errors import PredictError
from mapsage.maps.prediction import Prediction

UTM = dict(crs='EPSG:32633', transform=rasterio.Affine(0.5, 0, 500000, 0, -0.5, 5000000))
# Names of the inputs; the second one breaks.
SCENES = 'abcd'


@pytest.fixture(scope='module')
def model(tmp_path_factory) -> Tuple[Path, Path]:
    folder = tmp_path_factory.mktemp('model')
    return write_config(folder), write_checkpoint(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of four scenes in files without compression, and of one more for `replace`."""
    (tmp_path / 'in').mkdir()
    for name in SCENES:
        write_scene(tmp_path / f'in/{name}.tif', paint(80, 100), **UTM)
    write_scene(tmp_path / 'other.tif', paint(60, 100), **UTM)
    return tmp_path


def plan(
    model: Tuple[Path, Path], folder: Path, *options: Any, lines: Any = None
) -> Callable[[], int]:
    """Plan the maps of ``folder / 'in'``; return the function that makes them."""
    arguments = [
        *map(str, model),
        str(folder / 'in'),
        '--out',
        str(folder / 'out'),
        '--accelerator',
        'cpu',
        *map(str, options),
    ]
    args = predict.build_parser(arguments).parse_args(arguments)
    say = [].append if lines is None else lines.append
    prediction = Prediction(map_options(args), open_model(args, say), say)
    return lambda: run_prediction(prediction, say)


def remove(scene: Path) -> None:
    scene.unlink()


def cut(scene: Path) -> None:
    scene.write_bytes(scene.read_bytes()[:-9000])


def replace(scene: Path) -> None:
    """Put a scene of another height there."""
    shutil.copy(scene.parent.parent / 'other.tif', scene)


def write_again(scene: Path) -> None:
    """Write other pixels into a file of the same size."""
    size = scene.stat().st_size
    write_scene(scene, paint(80, 100)[::-1], **UTM)
    assert scene.stat().st_size == size


@pytest.mark.parametrize('break_scene', [remove, cut, replace, write_again])
def test_a_broken_scene_costs_its_own_map(model: Any, folder: Path, break_scene: Any) -> None:
    lines: List[str] = []
    make_maps = plan(model, folder, '--skip-broken', lines=lines)
    break_scene(folder / 'in/b.tif')
    assert make_maps() == PARTIAL
    assert sorted(path.name for path in (folder / 'out').glob('*.tif')) == [
        'a.tif',
        'c.tif',
        'd.tif',
    ]
    assert not list((folder / 'out').glob('.*'))
    np.testing.assert_array_equal(read(folder / 'out/d.tif'), paint(80, 100))
    end = '\n'.join(lines[-4:])
    assert 'skipped: ' in end and 'b.tif' in end and '1 of 4 input(s) skipped' in end


def test_a_scene_that_breaks_between_its_strips(
    model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is open and partly read when it is cut: the rest is not called damaged blocks."""
    write_scene(folder / 'in/b.tif', paint(500, 100), **UTM)
    make_maps = plan(model, folder, '--skip-broken', '--batch-size', 1)
    calls: List[int] = []
    forward = Unchanged.forward

    def cut_at_fifth_batch(self: Any, image: Any) -> Any:
        calls.append(1)
        if len(calls) == 5 + 4:
            cut(folder / 'in/b.tif')
        return forward(self, image)

    monkeypatch.setattr(Unchanged, 'forward', cut_at_fifth_batch)
    assert make_maps() == PARTIAL
    assert not (folder / 'out/b.tif').exists() and (folder / 'out/d.tif').exists()


def test_pictures_mosaic_files_and_folders(model: Any, folder: Path) -> None:
    """A png, the source of a VRT, and a folder whose scenes are all gone."""
    cv2.imwrite(str(folder / 'in/p.png'), COLORS[paint(80, 100)][:, :, ::-1])
    write_scene(folder / 'source.tif', paint(80, 100), **UTM)
    with rasterio.open(folder / 'source.tif') as source:
        rasterio.shutil.copy(source, str(folder / 'in/v.vrt'), driver='VRT')
    lines: List[str] = []
    make_maps = plan(model, folder, '--skip-broken', lines=lines)
    (folder / 'in/p.png').unlink()
    (folder / 'source.tif').unlink()
    assert make_maps() == PARTIAL
    assert len(list((folder / 'out').glob('*.tif'))) == len(SCENES)
    assert any('skipped' in line and 'p.png' in line for line in lines)
    assert any('skipped' in line and 'source.tif' in line for line in lines)
    shutil.rmtree(folder / 'out')
    make_maps = plan(model, folder, '--skip-broken')
    shutil.rmtree(folder / 'in')
    with pytest.raises(PredictError, match='none of the 5 input.*The other 4'):
        make_maps()


def test_without_the_option_the_scene_is_named(model: Any, folder: Path) -> None:
    make_maps = plan(model, folder)
    cut(folder / 'in/b.tif')
    with pytest.raises(PredictError, match=r'in/b\.tif changed from 24,\d+ to 15,\d+ bytes after'):
        make_maps()


def _break_on_ranks(model: Any, folder: Path, *options: str) -> Any:
    """Return the status of this rank, or its error and the lines it printed."""
    lines: List[str] = []
    make_maps = plan(model, folder, '--launcher', 'pytorch', *options, lines=lines)
    if os.environ['RANK'] == '0':
        remove(folder / 'in/b.tif')
        cut(folder / 'in/d.tif')
    open_channel().gather_texts('broken')
    try:
        return make_maps(), lines
    except (PredictError, RankError) as error:
        return str(error), lines


@main_leg
def test_ranks_leave_the_same_scenes_out(model: Any, folder: Path) -> None:
    """The scenes have strips on several ranks, and each rank finds only some of them broken."""
    for name in SCENES:
        write_scene(folder / f'in/{name}.tif', paint(300, 100), **UTM)
    answers = run_ranks(_break_on_ranks, 3, folder / 'ranks', model, folder, '--skip-broken')
    assert [status for status, _ in answers] == [PARTIAL, 0, 0]
    assert '2 of 4 input(s) skipped' in answers[0][1][-1]
    assert sorted(path.name for path in (folder / 'out').glob('*.tif')) == ['a.tif', 'c.tif']
    np.testing.assert_array_equal(read(folder / 'out/c.tif'), paint(300, 100))


@main_leg
def test_every_rank_names_the_scene(model: Any, folder: Path) -> None:
    for error, _ in run_ranks(_break_on_ranks, 2, folder / 'ranks', model, folder):
        assert 'in/b.tif' in error or 'in/d.tif' in error
