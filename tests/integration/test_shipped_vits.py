"""Every shipped config of EoMT, PMT and LoRA trains two steps, made small by options."""
from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Dict, Iterator, List

import numpy as np
import pytest
import torch
from dinov3_states import hub_state
from mini_archives import draw, png
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import RUNNERS
from support import ROOT, main_leg

from mapsage.commands import cli
from mapsage.engine.mask_annealing_hook import MaskAnnealingHook, mask_probability

pytestmark = [main_leg, pytest.mark.usefixtures('own_environment')]

CONFIGS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ('mask_transformers/*.py', 'dinov3/*lora*.py', 'demo/*eomt*.py', 'demo/*pmt*.py',
                    'demo/*lora*.py')
    for path in (ROOT / 'configs').glob(pattern))
# 24 blocks and 16 heads as ViT-L, so that whatever a config says of blocks and heads still holds.
DIMS, SIDE = 64, 64
ARCH = dict(embed_dims=DIMS, num_layers=24, num_heads=16, feedforward_channels=32)
LEVELS = ('neck', 'decode_head', 'auxiliary_head')
# By variable of the data root: number of classes, what a mask adds to a class, end of its name.
DATA = dict(MAPSAGE_LOVEDA=(7, 1, '.png'), MAPSAGE_DEMO=(7, 1, '.png'),
            MAPSAGE_POTSDAM=(6, 1, '.png'),
            MAPSAGE_ISAID=(16, 0, '_instance_color_RGB.png'))


def write_tiles(root: Path, classes: int, offset: int, suffix: str) -> None:
    for split in ('train', 'val'):
        images, masks = (root / kind / split for kind in ('img_dir', 'ann_dir'))
        for folder in (images, masks):
            folder.mkdir(parents=True)
        for number in range(2):
            image, mask = draw(number, SIDE, SIDE, classes)
            (images / f'P{number}.png').write_bytes(png(image))
            stored = np.where(mask == 255, 0 if offset else 255, mask + offset)
            (masks / f'P{number}{suffix}').write_bytes(png(stored.astype(np.uint8)))


def write_polygons(root: Path) -> None:
    """Two images in the layout of NWPU VHR-10, a square of each of its ten objects in either."""
    (root / 'images').mkdir(parents=True)
    names = ('airplane', 'ship', 'storage_tank', 'baseball_diamond', 'tennis_court',
             'basketball_court', 'ground_track_field', 'harbor', 'bridge', 'vehicle')
    for split, number in (('train', 0), ('val', 1)):
        (root / 'images' / f'{number}.png').write_bytes(png(draw(number, SIDE, SIDE, 3)[0]))
        squares = [(6. * i, 6. * i, 6. * i + 9, 6. * i + 9) for i in range(10)]
        (root / f'{split}.json').write_text(json.dumps(dict(
            images=[dict(id=number, file_name=f'{number}.png', width=SIDE, height=SIDE)],
            categories=[dict(id=i + 1, name=name) for i, name in enumerate(names)],
            annotations=[dict(id=i, image_id=number, category_id=i + 1, iscrowd=0, area=81,
                              bbox=[x, y, 9, 9],
                              segmentation=[[x, y, right, y, right, low, x, low]])
                         for i, (x, y, right, low) in enumerate(squares)])))


@pytest.fixture(scope='module')
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tiles of every data set, and weights of a small ViT under the names of the official files."""
    root = tmp_path_factory.mktemp('shipped')
    with pytest.MonkeyPatch.context() as patch:
        for name, (classes, offset, suffix) in DATA.items():
            write_tiles(root / name, classes, offset, suffix)
            patch.setenv(name, str(root / name))
        write_polygons(root / 'nwpu')
        patch.setenv('MAPSAGE_NWPU', str(root / 'nwpu'))
        weights = root / 'weights'
        weights.mkdir()
        for name in ('lvd1689m-8aa4cbdd', 'sat493m-eadcf0ff'):
            torch.save(hub_state(ARCH), str(weights / f'dinov3_vitl16_pretrain_{name}.pth'))
        patch.setenv('MAPSAGE_DINOV3', str(weights))
        yield root


def options_for(cfg: Config) -> Dict[str, Any]:
    """What --cfg-options would have to say for two steps of a small model."""
    size = (SIDE, SIDE)
    options: Dict[str, Any] = {
        'train_cfg.max_iters': 2, 'train_cfg.val_interval': 2, 'env_cfg.accelerator': 'cpu',
        'model.data_preprocessor.size': size, 'default_hooks.logger.interval': 1,
        'default_hooks.checkpoint.interval': 2, 'vis_backends': [], 'visualizer.vis_backends': []}
    if cfg.model.test_cfg.mode == 'slide':
        options.update({'model.test_cfg.crop_size': size, 'model.test_cfg.stride': (48, 48)})
    for loader in ('train_dataloader', 'val_dataloader'):
        options.update({f'{loader}.num_workers': 0, f'{loader}.persistent_workers': False})
        for index, step in enumerate(cfg[loader].dataset.pipeline):
            options.update({f'{loader}.dataset.pipeline.{index}.{key}': size
                            for key in ('scale', 'crop_size') if key in step})
    if cfg.model.backbone.get('arch') == 'large':
        options['model.backbone.arch'] = dict(_delete_=True, **ARCH)
        if cfg.model.get('neck'):
            options['model.neck.embed_dim'] = DIMS
        channels = cfg.model.decode_head.in_channels
        options['model.decode_head.in_channels'] = DIMS if isinstance(channels, int) else \
            [DIMS] * len(channels)
        if 'channels' in cfg.model.decode_head:
            options['model.decode_head.channels'] = DIMS
    return options


def runner_of(name: str, work: Path) -> Any:
    """Return the runner of a config of this repository."""
    parser = cli.build_parser('Train.')
    given = [str(ROOT / name), '--work-dir', str(work), '--accelerator', 'cpu']
    cfg = cli.load_config(parser.parse_args(given))
    shipped = copy.deepcopy(cfg)
    cfg.merge_from_dict(options_for(cfg))
    for part in ('optim_wrapper', 'param_scheduler', 'custom_hooks'):
        assert cfg.get(part) == shipped.get(part)
    cfg.experiment_name = f'shipped_{Path(name).stem}'
    return RUNNERS.build(cfg)


class Watch(Hook):
    """Keeps the weights before the first step, and the losses."""

    def before_train(self, runner: Any) -> None:
        self.start = {name: value.detach().clone() for name, value in
                      runner.model.named_parameters()}
        self.losses: List[float] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        self.losses.append(float(outputs['loss'].detach()))


@pytest.mark.parametrize('name', CONFIGS)
def test_two_steps_and_a_validation(name: str, folders: Path, tmp_path: Path) -> None:
    """With the config's own optimizer, schedule, hooks, data and weights."""
    runner, watch = runner_of(name, tmp_path), Watch()
    runner.register_hook(watch)
    model = runner.train()
    assert runner.iter == len(watch.losses) == 2 and np.isfinite(watch.losses).all()
    assert 0 <= runner.message_hub.get_scalar('val/mIoU').current() <= 100
    moved = {key for key, value in model.named_parameters()
             if not torch.equal(value, watch.start[key])}
    trained = {key for key, value in model.named_parameters() if value.requires_grad}
    assert moved and moved <= trained
    assert {key.split('.')[0] for key in moved} >= {'decode_head'}
    saved = torch.load(str(tmp_path / 'iter_2.pth'), weights_only=False)['state_dict']
    assert trained <= set(saved)
    if not watch.start.keys() <= set(saved):  # what is left out is frozen
        assert 'lora' in name
    hooks = [hook for hook in runner.hooks if isinstance(hook, MaskAnnealingHook)]
    if hooks:
        masked = [mask_probability(2, *phase) for phase in zip(hooks[0].starts, hooks[0].ends)]
        assert saved['decode_head.attn_mask_probs'].tolist() == pytest.approx(masked)
