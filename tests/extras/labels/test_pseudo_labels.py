"""Masks of what a model is sure of, and the training that they and the labels go into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, List, Tuple

import cv2
import numpy as np
import pytest
from color_model import paint, write_checkpoint
from geo_scenes import rectangle
from geotiff_data import write_vector
from labeling_files import (
    NAMES,
    UTM,
    joined,
    write_scene_training,
    write_tiles,
    write_training,
    write_unsure_scene,
)
from map_runs import read, run
from support import on_host

from mapsage.commands import train
from mapsage.commands.predict import PARTIAL
from mapsage.maps.errors import PredictError

pytestmark = on_host


def masks_of(dataset: Any) -> List[np.ndarray]:
    return [
        dataset[number]['data_samples'].gt_sem_seg.data[0].numpy() for number in range(len(dataset))
    ]


def either_way(mask: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether a mask is as expected, or flipped."""
    return any(np.array_equal(mask, each) for each in (expected, expected[:, ::-1]))


@pytest.mark.parametrize('reduce', ['', ', reduce_zero_label=True'], ids=['data', 'loader'])
def test_tiles_become_masks_and_a_config_that_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, reduce: str
) -> None:
    classes, unsure = write_tiles(tmp_path)
    model = write_training(tmp_path, reduce), write_checkpoint(tmp_path)
    out = tmp_path / 'more'
    assert run(model, tmp_path / 'img/train', '--pseudo-labels', out, '--min-share', 0) == 0
    text = capsys.readouterr().out
    assert (
        't0.png' in text.split('left out')[1].split('\n')[0] and not (out / 'masks/t0.png').exists()
    )
    expected = np.where(unsure, 255, classes)
    for number in (1, 2, 3):
        mask = cv2.imread(str(out / f'masks/t{number}.png'), cv2.IMREAD_UNCHANGED)
        assert np.array_equal(mask, expected)
    report = json.loads((out / 'pseudo_labels.json').read_text())
    pixels = {name: 3 * int((expected == number).sum()) for number, name in enumerate(NAMES)}
    assert {name: entry['kept'] for name, entry in report['classes'].items()} == pixels
    assert report['classes']['blue']['share_kept'] == 1
    dataset = joined(out)
    found = masks_of(dataset)
    # The label is repeated as often as there are tiles with masks.
    assert len(found) == 6 and all(either_way(mask, classes) for mask in found[:3])
    assert all(either_way(mask, expected) for mask in found[3:])
    monkeypatch.chdir(tmp_path)
    train.main([str(out / 'pseudo_labels.py'), '--accelerator', 'cpu'])
    assert (tmp_path / 'work_dirs/more/last_checkpoint').exists()


def test_a_rare_class_keeps_its_share_and_a_new_threshold_does_not_predict_again(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    classes, unsure = write_tiles(tmp_path)
    model = write_training(tmp_path), write_checkpoint(tmp_path)
    out = tmp_path / 'more'
    tiles = [tmp_path / f'img/train/t{number}.png' for number in (1, 2)]
    run(model, *tiles, '--pseudo-labels', out, '--min-confidence', 1)
    first = json.loads((out / 'pseudo_labels.json').read_text())['classes']
    capsys.readouterr()
    run(model, *tiles, '--pseudo-labels', out, '--min-confidence', 0.4)
    assert capsys.readouterr().out.count('made with the same settings: skipped') == 2
    second = json.loads((out / 'pseudo_labels.json').read_text())['classes']
    assert first['red']['threshold'] == 1 and second['red']['threshold'] == 0.4
    assert second['red']['kept'] == second['red']['predicted'] > first['red']['kept']
    assert second['red']['predicted'] == 2 * int(((classes == 0) | unsure).sum())


def test_a_scene_keeps_its_grid_and_its_labels(tmp_path: Path) -> None:
    classes, unsure = paint(150, 170), np.zeros((150, 170), bool)
    unsure[100:130, 100:] = True
    write_unsure_scene(tmp_path / 'scenes/a.tif', classes, unsure)
    other = dict(UTM, transform=UTM['transform'] * UTM['transform'].translation(400, 0))
    write_unsure_scene(tmp_path / 'scenes/b.tif', classes, unsure, other)
    # Beside what the model says: a drawn polygon counts, and no pseudo-label is below it.
    write_vector(tmp_path / 'labels.gpkg', [rectangle(UTM, 0, 0, 50, 20)], ['blue'], 'EPSG:32633')
    model = write_scene_training(tmp_path), write_checkpoint(tmp_path)
    out = tmp_path / 'more'
    run(model, tmp_path / 'scenes', '--pseudo-labels', out, '--tta', '--min-share', 0)
    expected = np.where(unsure, 255, classes)
    assert np.array_equal(read(out / 'masks/b.tif'), expected)
    expected[:20, :50] = 255
    assert np.array_equal(read(out / 'masks/a.tif'), expected)
    pseudo = joined(out).datasets[1]
    assert pseudo.scene_paths() == [str(tmp_path / f'scenes/{name}.tif') for name in 'ab']
    assert np.array_equal(pseudo.read_labels(0, 0, 0, 150), expected[:, :150])
    sample = pseudo[0]
    # Bands as the labeled dataset has them: blue first.
    assert np.array_equal(sample['inputs'].numpy()[::-1, 2, 2], [10, 10, 20])


def test_an_input_that_is_skipped_has_no_mask(tmp_path: Path) -> None:
    write_tiles(tmp_path, count=2)
    broken = tmp_path / 'img/train/t2.tif'
    broken.write_bytes(b'no image')
    out = tmp_path / 'more'
    model = write_training(tmp_path), write_checkpoint(tmp_path)
    status = run(model, tmp_path / 'img/train', '--pseudo-labels', out, '--skip-broken')
    assert status == PARTIAL
    assert [path.name for path in (out / 'masks').glob('*.*')] == ['t1.png']


@pytest.mark.parametrize(
    'break_it, words',
    [
        (lambda root: ['img/train/t0.png'], 'no unlabeled input'),
        (
            lambda root: (root / 'more/masks').mkdir(parents=True) or ['img/train/t1.png'],
            'was not made with this command',
        ),
        (lambda root: (root / 'empty').mkdir() or ['empty'], 'holds no image'),
    ],
    ids=['all labeled', 'foreign masks', 'empty folder'],
)
def test_what_cannot_be_is_said(tmp_path: Path, break_it: Any, words: str) -> None:
    write_tiles(tmp_path)
    model = write_training(tmp_path), write_checkpoint(tmp_path)
    inputs = [tmp_path / each for each in break_it(tmp_path)]
    with pytest.raises(PredictError, match=words):
        run(model, *inputs, '--pseudo-labels', tmp_path / 'more')


def test_classes_of_another_training_are_refused(tmp_path: Path) -> None:
    write_tiles(tmp_path)
    config = write_training(tmp_path)
    config.write_text(
        config.read_text() + "\nmetainfo['classes'] = tuple('abcd')\n"
        'train_dataloader["dataset"]["metainfo"] = metainfo\n'
    )
    import torch

    checkpoint = write_checkpoint(tmp_path)
    state = torch.load(str(checkpoint))
    torch.save(dict(state, meta=dict(dataset_meta=dict(classes=NAMES))), str(checkpoint))
    with pytest.raises(PredictError, match="model's classes are red, green, blue, dark, and"):
        run((config, checkpoint), tmp_path / 'img/train', '--pseudo-labels', tmp_path / 'more')


@pytest.mark.parametrize(
    'options, words',
    [
        (['--out', 'x', '--min-confidence', '0.8'], 'add --pseudo-labels'),
        (['--pseudo-labels', 'x', '--mosaic', 'city'], 'leave --mosaic out'),
        (['--pseudo-labels', 'x', '--min-confidence', '90'], 'expected 0 to 1'),
        ([], '--out is missing'),
    ],
    ids=['alone', 'mosaic', 'per cent', 'nothing'],
)
def test_options_that_do_not_fit(
    options: List[str], words: str, capsys: pytest.CaptureFixture, model: Tuple[Path, Path]
) -> None:
    with pytest.raises(SystemExit):
        run(model, 'a.tif', *options)
    assert words in capsys.readouterr().err
