"""tools/predict.py --probabilities: what it stores agrees with the map and with the model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Tuple

import numpy as np
import pytest
import rasterio
import torch
from color_model import NAMES, paint, write_checkpoint, write_config, write_scene
from map_runs import run
from support import ROOT, Launch, check_finished, main_leg

from mapsage.maps import windows
from mapsage.maps.errors import PredictError

UTM = dict(crs='EPSG:32633', transform=rasterio.Affine(0.5, 0, 500000, 0, -0.5, 5000000))


@pytest.fixture(scope='module')
def model(tmp_path_factory: Any) -> Tuple[Path, Path]:
    """The model of four colors, unsure enough that all classes have probabilities."""
    folder = tmp_path_factory.mktemp('model')
    checkpoint = write_checkpoint(folder)
    saved = torch.load(checkpoint)
    torch.save(
        dict(saved, state_dict={name: weight / 8 for name, weight in saved['state_dict'].items()}),
        checkpoint,
    )
    return write_config(folder), checkpoint


def read(path: Path) -> np.ndarray:
    with rasterio.open(path) as file:
        return file.read()


def noisy_scene(folder: Path, **options: Any) -> Path:
    """Write a scene of random colors with a hole, so that probabilities are of all sizes."""
    values = np.random.RandomState(0).randint(1, 255, (3, 90, 150)).astype(np.uint8)
    values[:, :20, :30] = 0
    with rasterio.open(
        folder / 'field.tif',
        'w',
        driver='GTiff',
        height=90,
        width=150,
        count=3,
        dtype='uint8',
        nodata=0,
        **UTM,
    ) as file:
        file.write(values)
    return folder / 'field.tif'


def test_a_scene_in_blocks_of_columns_has_the_same_files(model, tmp_path, monkeypatch) -> None:
    scene = noisy_scene(tmp_path)
    names = ('field.tif', 'field_confidence.tif', 'field_probabilities.tif', 'field.json')
    maps = []
    for sum_bytes in (1 << 30, 4000):
        monkeypatch.setattr(windows, '_SUM_BYTES', sum_bytes)
        out = tmp_path / str(sum_bytes)
        arguments = '--confidence', '--probabilities', '--batch-size', 1
        assert run(model, scene, '--out', out, *arguments) == 0
        maps.append([(out / name).read_bytes() for name in names])
    assert maps[0] == maps[1]
    assert windows.Grid(90, 150, (64, 64), 16).bounded(4).blocks == 3


def check_agrees(stored: np.ndarray, classes: np.ndarray, confidence: np.ndarray) -> None:
    known = classes != 255
    assert ((stored == 255) == ~known).all() and stored[:, known].max() <= 250
    # The map's class has the largest value, if perhaps not alone.
    best = np.take_along_axis(stored, np.where(known, classes, 0)[None], 0)[0]
    assert (best == stored.max(0))[known].all()
    np.testing.assert_allclose(best[known] / 2.5, confidence[known], atol=0.71)  # both rounded


@pytest.mark.parametrize('more', [(), ('--tta', '--scale', '1.5')])
def test_probabilities_agree_with_the_map(
    model: Tuple[Path, Path], tmp_path: Path, more: Tuple[str, ...]
) -> None:
    scene, out = noisy_scene(tmp_path), tmp_path / 'out'
    assert run(model, scene, '--out', out, '--confidence', '--probabilities', *more) == 0
    with rasterio.open(out / 'field_probabilities.tif') as file:
        stored = file.read()
        assert file.descriptions == NAMES and file.nodata == 255 and file.dtypes == 4 * ('uint8',)
        assert file.scales == 4 * (0.004,) and file.offsets == 4 * (0.0,)
        assert file.crs.to_epsg() == 32633 and file.transform == UTM['transform']
        assert [kind.name for kind in file.colorinterp] == ['gray'] + 3 * ['undefined']
        assert all(flags == [rasterio.enums.MaskFlags.nodata] for flags in file.mask_flag_enums)
    check_agrees(stored, read(out / 'field.tif')[0], read(out / 'field_confidence.tif')[0])
    known = stored[0] != 255
    # Four roundings to steps of 0.004 of values that sum to one
    assert np.abs(stored[:, known].astype(int).sum(0) - 250).max() <= 2
    assert len(np.unique(stored[:, known])) > 150
    if not more:  # within a window alone, these are the model's own
        with rasterio.open(scene) as file:
            pixels = torch.from_numpy(file.read(window=rasterio.windows.Window(0, 30, 40, 15)))
        weights = torch.load(model[1])['state_dict']
        logits = (
            torch.einsum(
                'kc,cyx->kyx', weights['decode_head.conv_seg.weight'][:, :, 0, 0], pixels / 255.0
            )
            + weights['decode_head.conv_seg.bias'][:, None, None]
        )
        np.testing.assert_allclose(
            stored[:, 30:45, :40], 250 * logits.softmax(0).numpy(), atol=0.51
        )
    cogeo = pytest.importorskip('rio_cogeo') if sys.version_info >= (3, 11) else None
    assert cogeo is None or cogeo.cog_validate(str(out / 'field_probabilities.tif'))[0]


def test_a_model_with_one_output_has_both_of_its_classes(
    model: Tuple[Path, Path], tmp_path: Path
) -> None:
    config = write_config(
        tmp_path,
        """
model['decode_head'].update(num_classes=2, out_channels=1, threshold=0.5)
test_dataloader['dataset']['metainfo'] = dict(classes=('land', 'water'),
                                              palette=[[0, 0, 0], [0, 0, 255]])
""",
    )
    checkpoint = tmp_path / 'one.pth'
    torch.save(
        dict(
            state_dict={
                'decode_head.conv_seg.weight': torch.tensor([[-4.0, 0, 4]])[:, :, None, None],
                'decode_head.conv_seg.bias': torch.zeros(1),
            }
        ),
        checkpoint,
    )
    out = tmp_path / 'out'
    assert (
        run(
            (config, checkpoint),
            noisy_scene(tmp_path),
            '--out',
            out,
            '--confidence',
            '--probabilities',
        )
        == 0
    )
    stored, classes = read(out / 'field_probabilities.tif'), read(out / 'field.tif')[0]
    assert stored.shape[0] == 2
    check_agrees(stored, classes, read(out / 'field_confidence.tif')[0])
    known = classes != 255
    assert (stored[:, known].astype(int).sum(0) == 250).all()
    with rasterio.open(out / 'field_probabilities.tif') as file:
        assert file.descriptions == ('land', 'water')


def test_they_belong_to_the_key(model: Tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    scene = write_scene(tmp_path / 'field.tif', paint(80, 90), **UTM)
    out = tmp_path / 'out'
    assert run(model, scene, '--out', out) == 0
    with pytest.raises(PredictError, match='made with another probabilities'):
        run(model, scene, '--out', out, '--probabilities')
    assert run(model, scene, '--out', out, '--probabilities', '--overwrite') == 0
    capsys.readouterr()
    assert run(model, scene, '--out', out, '--probabilities') == 0
    assert 'skipped' in capsys.readouterr().out
    (out / 'field_probabilities.tif').unlink()
    assert run(model, scene, '--out', out, '--probabilities') == 0  # predicted again
    assert (out / 'field_probabilities.tif').exists()
    assert run(model, scene, '--out', out, '--overwrite') == 0
    assert not (out / 'field_probabilities.tif').exists()  # of the map before


@main_leg
def test_ranks_share_them(model: Tuple[Path, Path], tmp_path: Path) -> None:
    scene = noisy_scene(tmp_path)
    options = ('--confidence', '--probabilities', '--window', '32')
    assert run(model, scene, '--out', tmp_path / 'one', *options) == 0
    check_finished(
        Launch(
            *model,
            scene,
            '--out',
            tmp_path / 'three',
            *options,
            ranks=3,
            command=['bash', 'scripts/predict.sh'],
            environ={'PYTHONPATH': str(ROOT / 'tests'), 'ACCELERATOR': 'cpu'},
        ).finish()
    )
    for name in ('field_probabilities.tif', 'field.tif', 'field.json'):
        assert (tmp_path / 'three' / name).read_bytes() == (tmp_path / 'one' / name).read_bytes()
