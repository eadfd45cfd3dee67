"""tools/export.py --card: a folder with all that somebody else needs of a model."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Tuple

import cv2
import numpy as np
import pytest
import torch
import yaml
from color_model import COLORS, NAMES, paint, write_checkpoint, write_config, write_scene
from map_runs import read
from map_runs import run as predict
from mmengine.config import Config
from mmengine.registry import MODELS

pytest.importorskip('onnx')
pytest.importorskip('onnxruntime')

from test_export import command, write_tiles  # noqa: E402

from mapsage.commands.checkpoint_model import load_model  # noqa: E402
from mapsage.extras.export.card import Card  # noqa: E402
from mapsage.extras.export.errors import ExportError  # noqa: E402
from mapsage.extras.export.model_card import draw, license_of  # noqa: E402
from mapsage.maps.description import Bands, ExportedDescription  # noqa: E402
from mapsage.maps.errors import PredictError  # noqa: E402

VALIDATION = """
val_dataloader.update(batch_size=1, num_workers=0,
                      sampler=dict(type='DefaultSampler', shuffle=False))
val_evaluator = dict(type='ConfusionMatrixMetric', iou_metrics=['mIoU'])
default_hooks = dict(checkpoint=dict(type='CheckpointHook', by_epoch=False, save_best='mIoU'))
"""
FILES = [
    'README.md',
    'config.py',
    'model.onnx',
    'model.onnx.json',
    'model.safetensors',
    'model.stac.json',
    'preview.png',
]


@pytest.fixture(scope='module')
def model(tmp_path_factory) -> Tuple[Path, Path]:
    """A model that is wrong where labels were painted over; its classes are in its checkpoint."""
    folder = tmp_path_factory.mktemp('model')
    data = write_tiles(folder / 'data')
    labels = folder / 'data' / 'ann' / '0.png'
    classes = cv2.imread(str(labels), cv2.IMREAD_UNCHANGED)
    classes[:30, :40] = 1
    classes[:10] = 255
    cv2.imwrite(str(labels), classes)
    path = write_checkpoint(folder)
    checkpoint = torch.load(str(path))
    checkpoint['meta'] = dict(dataset_meta=dict(classes=NAMES, palette=COLORS.tolist()))
    torch.save(checkpoint, str(path))
    return write_config(folder, data + VALIDATION), path


@pytest.fixture(scope='module')
def card(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('cards') / os.fsdecode('模型'.encode('gbk')) / 'a card'
    assert export(model, folder) == 0
    return folder


def export(model: Tuple[Path, Path], folder: Path, *arguments: Any) -> int:
    return command.main(
        [*map(str, model), '--card', str(folder), '--accelerator', 'cpu', *map(str, arguments)]
    )


def front_matter(readme: str) -> Dict[str, Any]:
    return yaml.safe_load(readme.split('---\n')[1])


def expected_ious(config: Path) -> np.ndarray:
    """Score the model, which answers each pixel's color, without any of the code under test."""
    right, either = np.zeros(4), np.zeros(4)
    for path in sorted((config.parent / 'data' / 'ann').iterdir()):
        truth = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        found = np.roll(paint(80, 90), 17 * int(path.stem), axis=1)
        for number in range(4):
            one, other = ((each == number) & (truth != 255) for each in (found, truth))
            right[number] += (one & other).sum()
            either[number] += (one | other).sum()
    return 100 * right / either


def test_the_readme_has_the_scores_of_the_whole_validation_set(model, card) -> None:
    assert sorted(path.name for path in card.iterdir()) == FILES
    readme = (card / 'README.md').read_text(encoding='utf-8')
    ious = expected_ious(model[0])
    assert ious.mean() < 99
    (result,) = front_matter(readme)['model-index'][0]['results']
    scores = {each['name']: each['value'] for each in result['metrics']}
    assert scores['mIoU'] == pytest.approx(ious.mean(), abs=0.006)
    assert result['dataset']['type'] == 'BaseSegDataset'
    assert f'| mIoU | {scores["mIoU"]:.2f} |' in readme and '3 images of the validation' in readme
    for name, iou in zip(NAMES, ious):
        assert f'| {name} | {iou:.2f} | ' in readme
    assert '16 tiles of the val set: largest difference' in readme
    assert 'license' not in front_matter(readme) and 'No license is stated' in readme
    # OpenCV cannot open a name in GBK itself.
    picture = cv2.imdecode(np.frombuffer((card / 'preview.png').read_bytes(), np.uint8), 1)
    assert picture.shape[1] > 1000


def test_the_weights_and_the_config_give_equal_logits(model, card) -> None:
    images = torch.rand(2, 3, 64, 64)
    both = []
    for config, weights in (model, (card / 'config.py', card / 'model.safetensors')):
        cfg = Config.fromfile(str(config))
        assert not cfg.get('work_dir') and not cfg.get('launcher')
        if weights.suffix == '.safetensors':  # the classes come along with the weights
            cfg.test_dataloader.dataset.pop('metainfo')
        built, classes, _ = load_model(cfg, str(weights))
        assert classes.names == NAMES and np.array_equal(classes.palette, COLORS)
        with torch.no_grad():
            both.append(built.eval()(images, mode='tensor'))
    assert torch.equal(*both)


def test_the_commands_of_the_readme_make_the_same_map(card, tmp_path) -> None:
    scene = write_scene(tmp_path / 'town.tif', paint(150, 170))
    assert (
        predict((card / 'config.py', card / 'model.safetensors'), scene, '--out', tmp_path / 'maps')
        == 0
    )
    assert (read(tmp_path / 'maps' / 'town.tif') == paint(150, 170)).all()
    damaged = tmp_path / 'cut.safetensors'
    damaged.write_bytes((card / 'model.safetensors').read_bytes()[:-8])
    with pytest.raises(PredictError, match='cut.safetensors is truncated or damaged'):
        predict((card / 'config.py', damaged), scene, '--out', tmp_path / 'others')


def test_a_folder_that_exists_keeps_its_files(model, tmp_path) -> None:
    folder = tmp_path / 'card'
    folder.mkdir()
    (folder / 'notes.txt').write_text('mine')
    (folder / 'README.md').write_text('mine, too')
    with pytest.raises(ExportError, match='README.md exists already.*--overwrite'):
        export(model, folder)
    assert (folder / 'README.md').read_text() == 'mine, too'
    # No evaluator, and so no scores.
    assert (
        export(model, folder, '--overwrite', '--tiles', 2, '--cfg-options', 'val_evaluator=') == 0
    )
    readme = (folder / 'README.md').read_text()
    assert 'the config has no `val_evaluator`' in readme
    assert 'model-index' not in front_matter(readme)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, 'notes.txt'])


def test_a_folder_that_cannot_be_written_is_an_error_at_once(model, tmp_path) -> None:
    (tmp_path / 'file').write_text('')
    for folder in (tmp_path / 'file', tmp_path / 'file' / 'card', Path('/proc/card')):
        with pytest.raises(ExportError, match=f'--card: cannot write into {folder}'):
            export(model, folder)


def test_the_license_of_dinov3_travels_with_its_weights(tmp_path) -> None:
    weights = tmp_path / 'dinov3'
    weights.mkdir()
    arch = dict(embed_dims=32, num_layers=1, num_heads=2, feedforward_channels=32)
    backbone = dict(type='DINOv3ViT', arch=arch)
    model = MODELS.build(dict(backbone))
    own = license_of(Config(dict(model=dict(backbone=backbone))), model, str(tmp_path), {})
    assert not own.dinov3 and not own.weights
    backbone['init_cfg'] = dict(type='Pretrained', checkpoint=str(weights / 'vit.pth'))
    cfg = Config(dict(model=dict(backbone=backbone)))
    (weights / 'LICENSE').write_text('MIT')
    without = license_of(cfg, model, str(tmp_path), {})
    (weights / 'LICENSE.md').write_text('# DINOv3 License')
    with_text = license_of(cfg, model, str(tmp_path), {})
    assert (without.dinov3, without.text) == (True, None)
    assert (with_text.text, with_text.weights) == (b'# DINOv3 License', ('vit.pth',))
    (tmp_path / 'LICENSE.md').write_text('# DINOv3 License, added by hand')
    assert license_of(cfg, model, str(tmp_path), {}).text.endswith(b'by hand')
    about = ExportedDescription(
        classes=('a|b', 'c'),
        palette=((0, 0, 0), (1, 1, 1)),
        bands=Bands(3, True),
        window=64,
        overlap=16,
        batch=None,
        scores=2,
        threshold=0.5,
        checkpoint='',
        target='qgis',
        version='1',
    )
    for license_, link in ((with_text, 'LICENSE.md'), (without, 'https://ai.meta.com/')):
        readme = Card(
            'a: "card"', 'DINOv3ViT + LinearHead', 1000, about, None, [], None, license_
        ).to_text()
        found = front_matter(readme)
        assert (found['license'], found['license_name']) == ('other', 'dinov3-license')
        assert found['license_link'].startswith(link)
        assert ('is a copy of it' in readme) == (license_ is with_text)
        assert ('Add a copy of it to this folder' in readme) == (license_ is without)


def test_the_preview_leaves_out_what_an_image_was_mirrored_by() -> None:
    about = SimpleNamespace(classes=('a', 'b'), palette=((0, 0, 0), (255, 0, 0)), threshold=0.5)
    labels = np.zeros((64, 64), np.int64)
    heights = []
    for rows in (64, 20):
        labels[rows:] = 255
        tile = SimpleNamespace(image=np.zeros((3, 64, 64), np.uint8), labels=labels)
        png = draw(
            Config(dict(model=dict())),
            about,
            lambda images: np.zeros((1, 2, 64, 64), np.float32),
            [tile],
        )
        heights.append(cv2.imdecode(np.frombuffer(png, np.uint8), 1).shape[0])
    assert heights[0] - heights[1] == 450 - round(450 * 20 / 64)
