"""tools/test.py and a training on windows of scenes: pictures, masks and mirror images."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict, List, Tuple

import cv2
import numpy as np
import pytest
import torch
from geo_scenes import PALETTE
from geotiff_data import METAINFO, build_dataset, write_scene
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import load_checkpoint
from support import write_tiny_config

from mapsage.commands import test as program
from mapsage.engine import MapSageRunner
from mapsage.pictures.tiles import display_rgb, resize

SCENES = """
scenes = dict(
    type='GeoTiffDataset', data_root={root!r}, scenes='scenes', labels='labels', window=160,
    bands=[1, 2, 3, 4], metainfo={metainfo!r}, pipeline=[
        dict(type='LoadGeoTiffWindow'), dict(type='LoadGeoTiffLabels'), dict(type='PackSegInputs')])
train_dataloader['dataset'] = val_dataloader['dataset'] = scenes
val_evaluator.update(type='ConfusionMatrixMetric')
model['data_preprocessor'] = dict(
    type='BandDataPreProcessor', mean=[90.] * 4, std=[40.] * 4, size=(160, 160), seg_pad_val=255)
model['backbone']['in_channels'] = 4
model['decode_head']['num_classes'] = 3
train_cfg.update(max_iters=1, val_interval=1)
visualizer = dict(type='SegLocalVisualizer', vis_backends=[dict(type='LocalVisBackend')])
"""
# what a config inherits from configs/_base_/datasets
STOCK_TTA = """
tta_model = dict(type='SegTTAModel')
tta_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='TestTimeAug', transforms=[
        [dict(type='RandomFlip', prob=p, direction='horizontal') for p in (0., 1.)],
        [dict(type='LoadAnnotations')], [dict(type='PackSegInputs')]])]
"""


@pytest.fixture(scope='module', params=['uint8', 'uint16', 'float32'])
def scenes(request: Any, tmp_path_factory: Any) -> Tuple[Path, Path]:
    """A config and its checkpoint, for a scene of 300 x 260 pixels with four bands."""
    return make_run(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope='module')
def uint16(tmp_path_factory: Any) -> Tuple[Path, Path]:
    return make_run(tmp_path_factory.mktemp('one'), 'uint16')


PREVIEW = "default_hooks.update(preview=dict(type='PreviewHook', max_images=1))\n"


def make_run(folder: Path, kind: str, extra: str = '') -> Tuple[Path, Path]:
    """Write scenes and a config, and a checkpoint of random weights."""
    write_scene(folder, 'a', bands=4, values=kind)
    config = write_tiny_config(
        folder / 'scenes.py',
        folder,
        SCENES.format(root=str(folder), metainfo=METAINFO) + PREVIEW + extra,
    )
    torch.manual_seed(1)
    torch.save(dict(state_dict=build_model(config).state_dict(), meta={}), folder / 'random.pth')
    return config, folder / 'random.pth'


def build_model(config: Path) -> Any:
    with DefaultScope.overwrite_default_scope('mmseg'):
        return MODELS.build(Config.fromfile(str(config)).model)


def run_test(run: Tuple[Path, Path], work: Path, *options: Any) -> Dict[str, float]:
    """Run tools/test.py in this process; return its figures."""
    program.main(
        [
            *map(str, run),
            '--work-dir',
            str(work),
            '--accelerator',
            'cpu',
            '--cfg-options',
            f'experiment_name={work.parent.name}{work.name}',
            *map(str, options),
        ]
    )
    return json.loads(next(work.glob('*/[0-9]*.json')).read_text().splitlines()[-1])


def windows(folder: Path) -> Dict[str, Tuple[np.ndarray, np.ndarray]]:
    """Return image (bands, height, width) and mask of each window by its name."""
    dataset = build_dataset(folder, window=160, test_mode=True, bands=[1, 2, 3, 4])
    return {
        Path(sample['data_samples'].img_path).stem: (
            sample['inputs'].numpy(),
            sample['data_samples'].gt_sem_seg.data[0].numpy(),
        )
        for sample in dataset
    }


def read_picture(path: Path) -> np.ndarray:
    return cv2.imread(str(path))[..., ::-1]


def laid_over(image: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return what SegLocalVisualizer draws, but for the names of the classes."""
    colors = np.concatenate([PALETTE, np.zeros((253, 3))])[labels]
    return (image * 0.2 + colors * 0.8).astype(np.uint8)


def test_show_dir_draws_each_window(scenes: Tuple[Path, Path], tmp_path: Path) -> None:
    run_test(scenes, tmp_path / 'work', '--show-dir', tmp_path / 'show', '--out', tmp_path / 'out')
    pictures = {
        re.sub(r'^test_|\.tif_\d+$', '', path.stem): path
        for path in (tmp_path / 'show').rglob('*.png')
    }
    expected = windows(scenes[0].parent)
    assert pictures.keys() == expected.keys() and len(pictures) == 4
    for name, path in pictures.items():
        image, truth = expected[name]
        prediction = cv2.imread(str(tmp_path / 'out' / f'{name}.png'), cv2.IMREAD_UNCHANGED)
        rgb = display_rgb(image.transpose(1, 2, 0))
        drawn = read_picture(path)
        wanted = np.concatenate([laid_over(rgb, truth), laid_over(rgb, prediction)], 1)
        assert drawn.shape == wanted.shape
        assert (np.abs(drawn.astype(int) - wanted) <= 1).all(2).mean() > 0.85  # without the names


def mirrored_mean(
    config: Path, checkpoint: Path, image: np.ndarray, axes: List[Tuple[int, ...]]
) -> np.ndarray:
    """Return the mean probabilities over mirror images, by a plain loop."""
    model = build_model(config).eval()
    load_checkpoint(model, str(checkpoint))
    total = 0
    for axis in axes:
        view = torch.from_numpy(np.flip(image, axis).astype(np.float32).copy())
        data = model.data_preprocessor(dict(inputs=[view]), False)
        with torch.no_grad():
            logits = model.encode_decode(
                data['inputs'], [dict(ori_shape=(160, 160), img_shape=(160, 160))]
            )[0]
        total = total + np.flip(logits.softmax(0).numpy(), axis)
    return total / len(axes)


def calibration(probabilities: List[np.ndarray], truths: List[np.ndarray]) -> float:
    """Return the calibration error in percent by its formula."""
    sure = np.concatenate([each.max(0)[truth != 255] for each, truth in zip(probabilities, truths)])
    right = np.concatenate(
        [(each.argmax(0) == truth)[truth != 255] for each, truth in zip(probabilities, truths)]
    )
    bins = np.ceil(sure * 15)
    return (
        100
        * sum(abs(right[bins == each].sum() - sure[bins == each].sum()) for each in range(1, 16))
        / len(sure)
    )


@pytest.mark.parametrize(
    'tta, axes, wrapped',
    [('', [(), (2,), (1,)], True), (STOCK_TTA, [(), (2,)], False)],
    ids=['mirrored', 'inherited'],
)
def test_tta_averages_over_mirror_images(
    tta: str, axes: Any, wrapped: bool, tmp_path: Path
) -> None:
    extra = "val_dataloader['dataset'] = dict(type='ConcatDataset', datasets=[scenes])\n" * wrapped
    run = make_run(tmp_path, 'uint16', tta + extra)
    figures = run_test(run, tmp_path / 'work', '--tta', '--out', tmp_path / 'out', '--calibration')
    expected = windows(tmp_path)
    means = [mirrored_mean(*run, image, axes) for image, _ in expected.values()]
    for name, mean in zip(expected, means):
        found = cv2.imread(str(tmp_path / 'out' / f'{name}.png'), cv2.IMREAD_UNCHANGED)
        assert (found == mean.argmax(0)).mean() > 0.999  # sums in another order
    # of the merged prediction, and pixels that two windows share count once
    error = calibration(means, [truth for _, truth in expected.values()])
    assert figures['ECE'] == pytest.approx(error, abs=0.02)
    assert read_picture(tmp_path / 'work' / 'reliability.png').std() > 20


def test_pictures_of_mirrored_windows_are_those_of_the_windows(
    uint16: Tuple[Path, Path], tmp_path: Path
) -> None:
    run_test(uint16, tmp_path / 'plain', '--show-dir', tmp_path / 'a')
    run_test(uint16, tmp_path / 'tta', '--show-dir', tmp_path / 'b', '--tta')
    first, other = (sorted((tmp_path / name).rglob('*.png')) for name in 'ab')
    assert [path.name for path in first] == [path.name for path in other]
    for path, mirrored in zip(first, other):
        truth = np.s_[:, :160]
        assert (read_picture(path)[truth] == read_picture(mirrored)[truth]).all()
    assert read_picture(tmp_path / 'tta' / 'preview.png').shape[1] > 1000


def test_show_draws_each_window(
    uint16: Tuple[Path, Path], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv('DISPLAY', ':0')  # for the check; Matplotlib draws without one
    monkeypatch.setenv('MPLBACKEND', 'Agg')
    found = run_test(uint16, tmp_path / 'work', '--show', '--wait-time', 0.01)
    assert found['mIoU'] >= 0 and not list(tmp_path.rglob('vis_image'))


def test_named_colors_are_those_of_the_preview(tmp_path: Path) -> None:
    """The preview of a training: the channels that are red, green and blue for the backbone."""
    config, _ = make_run(
        tmp_path,
        'uint16',
        """
model['backbone'] = dict(
    type='DINOv3ViT', in_channels=4, bands=dict(rgb=(2, 3, 0)), out_indices=(0, ),
    arch=dict(embed_dims=12, num_layers=1, num_heads=3, feedforward_channels=12))
model['decode_head'].update(in_channels=12, in_index=0)
default_hooks.update(
    visualization=dict(type='SegVisualizationHook', draw=True, interval=1))
""",
    )
    cfg = Config.fromfile(str(config))
    cfg.merge_from_dict(dict(work_dir=str(tmp_path / 'work'), experiment_name=tmp_path.name))
    cfg.env_cfg.accelerator = 'cpu'
    MapSageRunner.from_cfg(cfg).train()
    drawn = read_picture(next((tmp_path / 'work').rglob('val_a_0_0.tif_*.png')))
    image, truth = windows(tmp_path)['a_0_0']
    colors = display_rgb(image[[2, 3, 0]].transpose(1, 2, 0))
    assert (np.abs(drawn[:, :160].astype(int) - laid_over(colors, truth)) <= 1).all(2).mean() > 0.85
    preview = read_picture(tmp_path / 'work' / 'preview.png')
    tile = resize(preview[84 : 84 + 450, 28 : 28 + 450], 160, 160, nearest=True)
    # one of four windows, whose name is in the picture: the nearest must be this close
    assert (
        min(
            np.abs(tile.astype(int) - display_rgb(each[[2, 3, 0]].transpose(1, 2, 0))).mean()
            for each, _ in windows(tmp_path).values()
        )
        < 5
    )
