"""The configs that the installed MMSegmentation ships, shrunk to two steps on small images."""

from __future__ import annotations

import copy
import fnmatch
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

import cv2
import mmseg
import numpy as np
import torch
from both_runners import differences, run_configs
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmseg.registry import DATASETS
from users_parts import digest

_DOCUMENT = Path(__file__).resolve().parents[2] / 'docs' / 'reference' / 'conformance.md'
FOLDER = Path(mmseg.__file__).parent / '.mim' / 'configs'
SIDE, IMAGES, STEPS = 64, 4, 2  # pixels, and numbers
_SIDE_OF_LRASPP = 400  # its pooling has a window of 49 on features of an eighth of the image

# Transforms that draw no random numbers. The rest of a pipeline is left out: MapSage draws by the
# position of a sample, which docs/reference/conformance.md lists.
_TRANSFORMS = ('LoadImageFromFile', 'LoadAnnotations', 'GenerateEdge', 'PackSegInputs')


@HOOKS.register_module()
class SameDrawsHook(Hook):
    """Seeds every batch after all other hooks, so that dropout is equal under both Runners."""

    priority = 'LOWEST'

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        torch.manual_seed(batch_idx)
        np.random.seed(batch_idx)

    before_val_iter = before_train_iter


@dataclass(frozen=True)
class Compared:
    """How the runs of a config under both Runners compare.

    Attributes:
        outcome: ``'equal'``, ``'differs'``, or ``'not trained'`` where Runner ends with an error
            and MapSageRunner with the same.
        detail: The first difference, or the error.
    """

    outcome: str
    detail: str = ''


def compare_shipped(name: str, data: Path, folder: Path) -> Compared:
    """Train and validate a shrunk config under both Runners, and compare all that they leave.

    Args:
        name: Name of the config, ``family/file.py``.
        data: Folder of :func:`write_shipped_images`.
        folder: Folder for the runs, which is emptied.
    """
    config, endings = shrunk_config(name, data), []
    for side in ('stock', 'ours'):
        ending = run_configs(side, [(copy.deepcopy(config), 'train')], folder / side)
        ending.weights = digest(ending.weights)  # of a large model, two runs do not fit memory
        endings.append(ending)
        shutil.rmtree(str(folder / side))
    lines = differences(*endings)
    if lines:
        return Compared('differs', lines[0])
    return Compared('not trained', endings[0].error) if endings[0].error else Compared('equal')


def shipped_configs() -> List[str]:
    """Return the names of all configs, ``family/file.py``."""
    return sorted(
        str(path.relative_to(FOLDER))
        for path in FOLDER.glob('*/*.py')
        if path.parent.name != '_base_'
    )


def listed_reasons() -> Dict[str, str]:
    """Return the reasons of docs/reference/conformance.md by the pattern of their names."""
    return dict(
        re.findall(
            r'^\| `([\w*-]+/[\w*.-]+)` \| (.+) \|$', _DOCUMENT.read_text(), flags=re.MULTILINE
        )
    )


def reason_of(name: str) -> Optional[str]:
    """Return the listed reason why a config is not equal under both Runners, if there is one."""
    return next(
        (reason for pattern, reason in listed_reasons().items() if fnmatch.fnmatch(name, pattern)),
        None,
    )


def write_shipped_images(root: Path) -> Path:
    """Write images, and masks of two classes (``ann2``) and of three (``ann3``), by their side."""
    random = np.random.RandomState(3)
    for side in (SIDE, _SIDE_OF_LRASPP):
        folder = root / str(side)
        for kind in ('img', 'ann2', 'ann3'):
            (folder / kind).mkdir(parents=True)
        for number in range(IMAGES):
            blocks = random.randint(0, 3, (side // 8, side // 8)).astype(np.uint8)
            mask = blocks.repeat(8, 0).repeat(8, 1)
            image = random.randint(0, 120, (side, side, 3)).astype(np.uint8) + mask[..., None] * 60
            cv2.imwrite(str(folder / 'img' / f'{number}.png'), image)
            cv2.imwrite(str(folder / 'ann2' / f'{number}.png'), mask.clip(0, 1))
            cv2.imwrite(str(folder / 'ann3' / f'{number}.png'), mask)
    return root


def shrunk_config(name: str, data: Path) -> Dict[str, Any]:
    """Return a shipped config for two steps and a validation on four small images.

    Kept are the model's kinds of layers, heads, losses and samplers, the optimizer with its
    settings by parameter, the schedule, the kind of loop and the classes of the dataset. Shrunk
    are the depth of the model, the images and the data; weights of other trainings are left out.

    Args:
        name: Name of the config, ``family/file.py``.
        data: Folder of :func:`write_shipped_images`.
    """
    config = Config.fromfile(str(FOLDER / name), import_custom_modules=False).to_dict()
    config.pop('custom_imports', None)
    config.pop('load_from', None)
    model = config['model']
    side = _SIDE_OF_LRASPP if 'LRASPPHead' in repr(model.get('decode_head')) else SIDE
    _shrink_model(model, side)
    model['data_preprocessor'] = dict(
        model.get('data_preprocessor') or config['data_preprocessor'], size=(side, side)
    )
    model['data_preprocessor'].pop('size_divisor', None)
    for split in ('train', 'val', 'test'):
        loader = config[f'{split}_dataloader']
        loader.update(
            num_workers=0,
            persistent_workers=False,
            batch_size=2,
            dataset=_small_dataset(loader['dataset'], data / str(side)),
        )
    if 'max_iters' in config['train_cfg']:
        config['train_cfg'].update(max_iters=STEPS, val_interval=STEPS)
    else:
        config['train_cfg'].update(max_epochs=1, val_interval=1)
    wrapper = config['optim_wrapper']
    if wrapper['type'] == 'AmpOptimWrapper':
        wrapper.pop('loss_scale', None)
        wrapper['dtype'] = 'bfloat16'
    config['default_hooks']['checkpoint'].update(interval=10**6, save_last=False)
    config['default_hooks']['checkpoint'].pop('save_best', None)
    config['default_hooks']['logger'].update(interval=1)
    config['custom_hooks'] = [
        *(config.get('custom_hooks') or ()),
        dict(type='SameDrawsHook'),
        dict(type='RecordHook'),
    ]
    config['visualizer'].pop('name', None)  # that of the run, so that two runs have two
    config.update(randomness=dict(seed=5), resume=False, launcher='none')
    return config


def _small_dataset(dataset: Dict[str, Any], data: Path) -> Dict[str, Any]:
    """Return a dataset of the small images with the classes and the pipeline of another."""
    while 'dataset' in dataset or 'datasets' in dataset:
        dataset = dataset.get('dataset') or dataset['datasets'][0]
    metainfo = dict(DATASETS.get(dataset['type']).METAINFO, **dataset.get('metainfo') or {})
    pipeline = [step for step in dataset['pipeline'] if step['type'] in _TRANSFORMS]
    shifted = any(step.get('reduce_zero_label') for step in pipeline)
    # Those of a dataset in DSDL's format are in its files.
    classes = metainfo.get('classes') or [f'class {number}' for number in range(19)]
    return dict(
        type='BaseSegDataset',
        data_root=str(data),
        img_suffix='.png',
        metainfo=dict(classes=classes, palette=[[number] * 3 for number in range(len(classes))]),
        reduce_zero_label=shifted,
        pipeline=pipeline,
        data_prefix=dict(
            img_path='img', seg_map_path='ann2' if len(classes) == 2 and not shifted else 'ann3'
        ),
    )


def _shrink_model(model: Any, side: int) -> None:
    """Shorten the stages of a model in place, and leave pretrained weights out."""
    if isinstance(model, (list, tuple)):
        for part in model:
            _shrink_model(part, side)
    if not isinstance(model, dict):
        return
    for key in ('pretrained', 'checkpoint'):
        if isinstance(model.get(key), str):
            model[key] = None
    if (
        (model.get('init_cfg') or {})
        and isinstance(model['init_cfg'], dict)
        and model['init_cfg'].get('type') == 'Pretrained'
    ):
        model['init_cfg'] = None
    if 'img_size' in model:
        model['img_size'] = (side, side)
    if isinstance(model.get('depth'), int) and model['depth'] > 50:
        model['depth'] = 50
    if isinstance(model.get('depths'), (list, tuple)):  # Swin, Twins, ConvNeXt, SegNeXt
        model['depths'] = [2 if depth > 1 else 1 for depth in model['depths']]
    layers = model.get('num_layers')
    if isinstance(layers, (list, tuple)):  # SegFormer
        model['num_layers'] = [1] * len(layers)
    elif isinstance(layers, int) and layers > 6 and 'out_indices' in model:  # ViT, BEiT, MAE
        taken = model['out_indices']
        count = 1 if isinstance(taken, int) else len(taken)
        model.update(num_layers=count, out_indices=list(range(count)))
    for name, stage in (model.get('extra') or {}).items():  # HRNet
        if name.startswith('stage') and isinstance(stage, dict):
            stage.update(num_modules=1, num_blocks=[1] * len(stage['num_blocks']))
    for part in model.values():
        _shrink_model(part, side)
