"""Pseudo-labels one step aside: wrapped data, FixMatch, ranks, bands, names, breaking off."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Dict, List, Tuple

import cv2
import numpy as np
import pytest
import rasterio
from color_model import COLORS, paint, write_checkpoint, write_config
from geo_scenes import rectangle, write_areas
from geotiff_data import write_vector
from labeling_files import (
    SCENES,
    UTM,
    joined,
    write_scene_training,
    write_tiles,
    write_training,
    write_unsure_scene,
)
from map_runs import read, run
from mmengine.config import Config
from support import ROOT, Launch, check_finished, main_leg, on_host

from mapsage.commands import train
from mapsage.maps.errors import PredictError

pytestmark = on_host

NAMED = "dict(type='NamedSamples', names={names!r}, dataset={dataset})"
# What wraps the labeled dataset d, and how many samples come of it and of three masks.
WRAPPED: Dict[str, Tuple[str, int]] = {
    'names': (NAMED.format(names='{root}/labeled.txt', dataset='dict(d, ann_file="")'), 6),
    'repeated': ("dict(type='RepeatDataset', times=2, dataset=d)", 12),
    'joined': (
        "dict(type='ConcatDataset', datasets=[dict(type='RepeatDataset', times=1, dataset=d)])",
        6,
    ),
    'repeated names': (
        "dict(type='RepeatDataset', times=2, dataset="
        + NAMED.format(names='{root}/labeled.txt', dataset='dict(d, ann_file="")')
        + ')',
        12,
    ),
}
FIXMATCH = """
d = train_dataloader['dataset']
weak = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), dict(type='HideLabels'),
        dict(type='PackUnlabeledInputs')]
train_dataloader = dict(
    batch_size=2, num_workers=0,
    sampler=dict(type='LabeledUnlabeledSampler', labeled=1, unlabeled=1),
    dataset=dict(
        type='SemiSupervisedDataset',
        labeled=dict(type='NamedSamples', names={names!r}, dataset=dict(d, ann_file='')),
        unlabeled=dict(type='NamedSamples', names={names!r}, exclude=True,
                       dataset=dict(d, ann_file='', pipeline=weak))))
custom_hooks = [dict(type='FixMatchHook', threshold=0.5), dict(type='IterTimerHook')]
"""


def masks_in(folder: Path) -> List[str]:
    return sorted(path.name for path in (folder / 'masks').iterdir())


def label_all(root: Path) -> None:
    """Write masks of another class for the other tiles, which nothing may take for labels."""
    for number in (1, 2, 3):
        cv2.imwrite(str(root / f'ann/train/t{number}.png'), np.ones((64, 64), np.uint8))


@pytest.mark.parametrize('kind', list(WRAPPED))
def test_the_masks_join_what_is_wrapped(tmp_path: Path, kind: str) -> None:
    classes, unsure = write_tiles(tmp_path)
    label_all(tmp_path)
    config, (wrapper, count) = write_training(tmp_path), WRAPPED[kind]
    config.write_text(
        config.read_text() + f"\nd = train_dataloader['dataset']\n"
        f"train_dataloader['dataset'] = {wrapper.format(root=tmp_path)}\n"
    )
    run(
        (config, write_checkpoint(tmp_path)),
        tmp_path / 'img/train',
        '--pseudo-labels',
        tmp_path / 'more',
        '--min-share',
        0,
    )
    assert masks_in(tmp_path / 'more') == ['t1.png', 't2.png', 't3.png']
    dataset, expected = joined(tmp_path / 'more'), np.where(unsure, 255, classes)
    assert len(dataset) == count
    found = [
        dataset[number]['data_samples'].gt_sem_seg.data[0].numpy() for number in range(len(dataset))
    ]
    for wanted in (classes, expected):  # labels and masks, as often as each other
        assert (
            sum(
                np.array_equal(mask, wanted) or np.array_equal(mask, wanted[:, ::-1])
                for mask in found
            )
            == count / 2
        )


def test_a_training_by_fixmatch_goes_on_with_masks(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiles(tmp_path)
    label_all(tmp_path)
    config = write_training(tmp_path)
    config.write_text(config.read_text() + FIXMATCH.format(names=str(tmp_path / 'labeled.txt')))
    monkeypatch.chdir(tmp_path)
    train.main(
        [
            str(config),
            '--accelerator',
            'cpu',
            '--work-dir',
            'first',
            '--cfg-options',
            f'load_from={write_checkpoint(tmp_path)}',
        ]
    )
    assert 'FixMatch' in capsys.readouterr().out
    # Unlabeled images of the training are what the masks are for; the labeled one is not.
    checkpoint = Path((tmp_path / 'first/last_checkpoint').read_text())
    run((config, checkpoint), tmp_path / 'img/train', '--pseudo-labels', 'more')
    assert masks_in(tmp_path / 'more') == ['t1.png', 't2.png', 't3.png']
    cfg = Config.fromfile('more/pseudo_labels.py')
    assert cfg.train_dataloader.sampler.type == 'InfiniteSampler'
    assert [hook.type for hook in cfg.custom_hooks] == ['IterTimerHook']
    assert 'accelerator' not in (cfg.get('env_cfg') or {})  # that was for the prediction
    assert len(joined(tmp_path / 'more')) == 6
    train.main(['more/pseudo_labels.py', '--accelerator', 'cpu'])
    assert (tmp_path / 'work_dirs/more/last_checkpoint').exists()


@main_leg
def test_ranks_write_the_same_masks(tmp_path: Path) -> None:
    classes, unsure = paint(400, 150), np.zeros((400, 150), bool)
    unsure[300:330] = True
    for name, left in (('a', 0), ('b', 100), ('c', 200)):
        place = dict(UTM, transform=UTM['transform'] * UTM['transform'].translation(left, 0))
        write_unsure_scene(tmp_path / f'scenes/{name}.tif', classes, unsure, place)
    write_vector(tmp_path / 'labels.gpkg', [rectangle(UTM, 0, 0, 50, 20)], ['blue'], 'EPSG:32633')
    model = write_scene_training(tmp_path), write_checkpoint(tmp_path)
    config = model[0]
    config.write_text(
        config.read_text() + "\ntrain_dataloader['dataset']['windows'] = dict("
        "type='random', balance='classes')\n"
    )
    aoi = write_areas(tmp_path / 'aoi.gpkg', [rectangle(UTM, 0, 0, 600, 350)], 'EPSG:32633')
    options = [tmp_path / 'scenes', '--tta', '--amp', '--aoi', aoi, '--pseudo-labels']
    run(model, *options, tmp_path / 'one')
    found = Launch(
        *model,
        *options,
        tmp_path / 'three',
        ranks=3,
        command=['bash', 'scripts/predict.sh'],
        environ={'PYTHONPATH': str(ROOT / 'tests'), 'ACCELERATOR': 'cpu'},
    ).finish()
    check_finished(found)
    assert found.output.count('train on both:') == 1
    for name in 'abc':
        one, three = (read(tmp_path / folder / f'masks/{name}.tif') for folder in ('one', 'three'))
        np.testing.assert_array_equal(one, three)
        assert (one[350:] == 255).all() and (one[300:330] == 255).all()
        assert (one[:300, 60:] == classes[:300, 60:]).all()
    one, three = (
        json.loads((tmp_path / folder / 'pseudo_labels.json').read_text())
        for folder in ('one', 'three')
    )
    assert one == three and one['inputs'] == 3


def test_a_run_that_breaks_off_leaves_no_config_of_other_masks(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_tiles(tmp_path)
    model, out = (write_training(tmp_path), write_checkpoint(tmp_path)), tmp_path / 'more'
    tiles = tmp_path / 'img/train'
    run(model, tiles, '--pseudo-labels', out)
    (out / 'masks/t3.png').unlink()
    (out / 'masks/t3.png').mkdir()  # nothing can be written here
    with pytest.raises(PredictError, match='cannot write into'):
        run(model, tiles, '--pseudo-labels', out, '--min-confidence', 0.3)
    assert (out / 'masks/t2.png').exists() and not (out / 'pseudo_labels.py').exists()
    (out / 'masks/t3.png').rmdir()
    capsys.readouterr()
    run(model, tiles, '--pseudo-labels', out, '--min-confidence', 0.3)
    assert capsys.readouterr().out.count('skipped') == 3 and len(joined(out)) == 6


def test_the_ground_that_scores_are_computed_on_has_no_mask(tmp_path: Path) -> None:
    """Training and validation are areas of one scene: no mask on either, one everywhere else."""
    classes = paint(150, 170)
    write_unsure_scene(tmp_path / 'scenes/a.tif', classes, np.zeros(classes.shape, bool))
    write_vector(tmp_path / 'labels.gpkg', [rectangle(UTM, 0, 0, 170, 150)], ['blue'], 'EPSG:32633')
    config = write_scene_training(tmp_path)
    for name, box in (('train', (0, 0, 40, 150)), ('val', (100, 0, 170, 150))):
        write_areas(tmp_path / f'{name}.gpkg', [rectangle(UTM, *box)], 'EPSG:32633')
    config.write_text(
        config.read_text()
        + (
            "\ntrain_dataloader['dataset']['aoi'] = 'train.gpkg'\n"
            "val_dataloader = dict(dataset=dict(train_dataloader['dataset'], aoi='val.gpkg'))\n"
        )
    )
    run(
        (config, write_checkpoint(tmp_path)),
        tmp_path / 'scenes',
        '--pseudo-labels',
        tmp_path / 'more',
        '--min-share',
        1,
    )
    expected = np.where((np.arange(170) < 40) | (np.arange(170) >= 100), 255, classes)
    np.testing.assert_array_equal(read(tmp_path / 'more/masks/a.tif'), expected)


def test_images_that_scores_are_computed_on_are_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_tiles(tmp_path)
    label_all(tmp_path)
    (tmp_path / 'val.txt').write_text('t1\n')
    config = write_training(tmp_path)
    config.write_text(
        config.read_text() + '\nval_dataloader = dict(dataset=dict('
        "train_dataloader['dataset'], ann_file='val.txt'))\n"
    )
    run(
        (config, write_checkpoint(tmp_path)),
        tmp_path / 'img/train',
        '--pseudo-labels',
        tmp_path / 'more',
    )
    assert masks_in(tmp_path / 'more') == ['t2.png', 't3.png']
    line = capsys.readouterr().out.split('scores on: ')[1].split('\n')[0]
    assert line == str(tmp_path / 'img/train/t1.png')


def test_four_bands_of_sixteen_bits_with_zero_for_no_data(tmp_path: Path) -> None:
    classes = paint(150, 170)
    values = (
        np.concatenate(
            [COLORS[classes].transpose(2, 0, 1), np.full((1, *classes.shape), 9)]
        ).astype(np.uint16)
        * 100
    )
    values[:, :, 120:] = 0
    (tmp_path / 'scenes').mkdir()
    scene = tmp_path / 'scenes/a scene.tif'
    with rasterio.open(
        str(scene),
        'w',
        driver='GTiff',
        height=150,
        width=170,
        count=4,
        dtype='uint16',
        nodata=0,
        **UTM,
    ) as file:
        file.write(values)
    write_vector(tmp_path / 'labels.gpkg', [rectangle(UTM, 0, 0, 50, 20)], ['blue'], 'EPSG:32633')
    config = write_config(
        tmp_path,
        SCENES.format(root=str(tmp_path)).replace('bands=[3, 2, 1]', 'bands=[1, 2, 3, 4]')
        + """
model['data_preprocessor'] = dict(
    type='BandDataPreProcessor', mean=[0.] * 4, std=[25500.] * 4, size=(64, 64))
model['decode_head']['in_channels'] = model['decode_head']['channels'] = 4
""",
    )
    import torch

    checkpoint = write_checkpoint(tmp_path)
    state = torch.load(str(checkpoint))
    name = 'decode_head.conv_seg.weight'
    weight = state['state_dict'][name]
    state['state_dict'][name] = torch.cat([weight, torch.zeros(4, 1, 1, 1)], 1)
    torch.save(state, str(checkpoint))
    run(
        (config, checkpoint),
        tmp_path / 'scenes',
        '--pseudo-labels',
        tmp_path / 'more',
        '--min-share',
        1,
    )
    expected = np.where(np.arange(170) < 120, classes, 255)
    expected[:20, :50] = 255
    np.testing.assert_array_equal(read(tmp_path / 'more/masks/a scene.tif'), expected)
    pseudo = joined(tmp_path / 'more').datasets[1]
    np.testing.assert_array_equal(pseudo.read_labels(0, 64, 0, 64), expected[:64, 64:128])
    assert pseudo[0]['inputs'].shape == (4, 64, 64)


def test_a_name_that_is_no_utf8_is_refused_before_anything_is_predicted(tmp_path: Path) -> None:
    write_tiles(tmp_path)
    model = write_training(tmp_path), write_checkpoint(tmp_path)
    name = os.fsencode(str(tmp_path / 'img/train')) + b'/' + '\u571f\u5730'.encode('gbk') + b'.png'
    os.rename(os.fsencode(str(tmp_path / 'img/train/t3.png')), name)
    with pytest.raises(PredictError, match='is not in UTF-8, the only encoding'):
        run(model, tmp_path / 'img/train', '--pseudo-labels', tmp_path / 'more')
    assert not list((tmp_path / 'more').rglob('*.tif'))


def test_classes_without_a_label_are_named_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_tiles(tmp_path)
    model = write_training(tmp_path), write_checkpoint(tmp_path)
    image = COLORS[np.full((64, 64), 3)]
    image[:8] = [128, 128, 10]  # red or green, with half the probability each
    cv2.imwrite(str(tmp_path / 'dark.png'), image[..., ::-1])
    run(model, tmp_path / 'dark.png', '--pseudo-labels', tmp_path / 'more', '--min-share', 0)
    text = capsys.readouterr().out
    assert 'no pseudo-label teaches green, blue: the model predicts it nowhere' in text
    assert 'no pseudo-label teaches red (0.9): no pixel of it has this confidence' in text


def test_the_training_does_not_write_where_the_first_one_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiles(tmp_path)
    (tmp_path / 'work_dirs/more').mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    model = write_training(tmp_path), write_checkpoint(tmp_path / 'work_dirs/more')
    run(model, 'img/train', '--pseudo-labels', 'more')
    cfg = Config.fromfile('more/pseudo_labels.py')
    assert cfg.work_dir == 'work_dirs/more_pseudo_labels'
