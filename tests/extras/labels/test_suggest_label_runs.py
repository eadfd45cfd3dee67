"""Suggested windows one step aside: FixMatch, missing data, names, another scale, batches."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Dict, List, Tuple

import cv2
import numpy as np
import pytest
from color_model import paint
from geo_scenes import rectangle
from geotiff_data import write_vector
from labeling_files import (
    UTM,
    suggest,
    write_image,
    write_scene_training,
    write_sure_checkpoint,
    write_tiles,
    write_training,
    write_unsure_scene,
)
from support import on_host

from mapsage.maps.errors import PredictError

pytestmark = on_host

FIXMATCH = """
d = dict(train_dataloader['dataset'], ann_file='')
weak = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), dict(type='HideLabels'),
        dict(type='PackUnlabeledInputs')]
train_dataloader = dict(
    batch_size=2, num_workers=0,
    sampler=dict(type='LabeledUnlabeledSampler', labeled=1, unlabeled=1),
    dataset=dict(
        type='SemiSupervisedDataset',
        labeled=dict(type='NamedSamples', names={names!r}, dataset=d),
        unlabeled=dict(type='NamedSamples', names={names!r}, exclude=True,
                       dataset=dict(d, pipeline=weak))))
custom_hooks = [dict(type='FixMatchHook')]
"""


def table(path: Path) -> List[Dict[str, str]]:
    with open(str(path), encoding='utf-8', errors='surrogateescape') as file:
        return list(csv.DictReader(file))


def names(path: Path) -> List[str]:
    return [Path(line['path']).name for line in table(path)]


@pytest.fixture
def tiles(tmp_path: Path) -> Tuple[Path, Path]:
    """Config and checkpoint of a training on ``t0.png``; ``t1`` to ``t3`` are labeled nowhere."""
    write_tiles(tmp_path)
    for number in (1, 2, 3):  # unsure in 8, 16, 24 columns
        unsure = np.zeros((64, 64), bool)
        unsure[:, : 8 * number] = True
        write_image(tmp_path / f'img/train/t{number}.png', paint(64, 64), unsure)
    return write_training(tmp_path), write_sure_checkpoint(tmp_path)


def test_unlabeled_images_of_fixmatch_may_be_suggested(
    tiles: Tuple[Path, Path], tmp_path: Path
) -> None:
    for number in (1, 2, 3):  # hidden masks, which are for the log
        cv2.imwrite(str(tmp_path / f'ann/train/t{number}.png'), np.ones((64, 64), np.uint8))
    config = tiles[0]
    config.write_text(config.read_text() + FIXMATCH.format(names=str(tmp_path / 'labeled.txt')))
    suggest(tiles, tmp_path / 'img/train', '--out', tmp_path / 'new/folder/next.csv')
    found = names(tmp_path / 'new/folder/next.csv')
    assert found[0] == 't3.png' and sorted(found) == ['t1.png', 't2.png', 't3.png']


def test_labels_count_though_those_of_the_tests_are_missing(
    tiles: Tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = tiles[0]
    config.write_text(
        config.read_text() + '\ntest_dataloader = dict(dataset=dict('
        "train_dataloader['dataset'], data_root='nowhere', ann_file=''))\n"
    )
    suggest(tiles, tmp_path / 'img/train', '--out', tmp_path / 'next.csv')
    assert 'the labels of test_dataloader cannot be read' in capsys.readouterr().out
    assert 't0.png' not in names(tmp_path / 'next.csv')


def test_a_batch_holds_windows_of_several_files(tiles: Tuple[Path, Path], tmp_path: Path) -> None:
    write_image(tmp_path / 'img/train/wide.png', paint(64, 200), np.ones((64, 200), bool))
    for size in (1, 5):
        suggest(
            tiles,
            tmp_path / 'img/train',
            '--out',
            tmp_path / f'{size}.csv',
            '--batch-size',
            size,
            '--min-distance',
            0,
            '--tta',
        )
    assert len(table(tmp_path / '1.csv')) == 7
    assert (tmp_path / '1.csv').read_text() == (tmp_path / '5.csv').read_text()


def test_an_input_is_not_overwritten_by_the_picture(
    tiles: Tuple[Path, Path], tmp_path: Path
) -> None:
    image = tmp_path / 'img/train/t1.png'
    before = image.read_bytes()
    with pytest.raises(PredictError, match='would overwrite the input .*t1.png'):
        suggest(tiles, tmp_path / 'img/train', '--out', image.with_suffix('.csv'))
    assert image.read_bytes() == before
    (tmp_path / 'next.png').write_bytes(b'the picture of a run that was stopped behind it')
    suggest(tiles, tmp_path / 'img/train', '--out', tmp_path / 'next.csv')
    assert cv2.imread(str(tmp_path / 'next.png')) is not None


def test_several_processes_are_refused(
    tiles: Tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        suggest(tiles, tmp_path / 'img/train', '--out', tmp_path / 'n.csv', '--launcher', 'pytorch')
    assert 'windows are chosen by one process' in capsys.readouterr().err


def test_images_without_labels_cannot_be_checked(tiles: Tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(PredictError, match='has labels that could be checked'):
        suggest(tiles, tmp_path / 'img/train/t1.png', '--suspicious', '--out', tmp_path / 'n.csv')


def test_suspicious_labels_in_another_scale(tmp_path: Path) -> None:
    """The score is a share of the window, whatever the size that the model sees it in."""
    write_unsure_scene(
        tmp_path / 'scenes/a.tif', np.full((128, 128), 3, np.uint8), np.zeros((128, 128), bool)
    )
    write_vector(
        tmp_path / 'labels.gpkg',
        [rectangle(UTM, 0, 0, 128, 32), rectangle(UTM, 0, 32, 128, 64)],
        ['green', 'dark'],
        'EPSG:32633',
    )
    model = write_scene_training(tmp_path), write_sure_checkpoint(tmp_path)
    suggest(
        model, tmp_path / 'scenes', '--suspicious', '--scale', 0.5, '--out', tmp_path / 'check.csv'
    )
    (line,) = table(tmp_path / 'check.csv')
    assert (line['width'], float(line['score'])) == ('128', 0.25)
    assert line['reason'] == 'labeled green, the model is sure of dark: 50 % of labels'
