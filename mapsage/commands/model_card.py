"""The files of a model card beside an exported model: README, weights, config, preview."""
from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import cv2
import numpy as np
import torch
from mmengine.config import Config
from torch import nn

from mapsage.accelerator import current_accelerator
from mapsage.drawing.preview import PreviewSample, render_preview
from mapsage.evaluation.confusion_matrix import scores as score_matrix
from mapsage.export.card import (
    CONFIG,
    LICENSE,
    PREVIEW,
    README,
    WEIGHTS,
    Card,
    License,
    Validation,
)
from mapsage.hooks.batch_images import shown_channels
from mapsage.maps.description import ExportedDescription
from mapsage.models import DINOv3ConvNeXt, DINOv3ViT

from . import cli

FILES = (README, CONFIG, WEIGHTS, PREVIEW, LICENSE)
_SHOWN = 4  # windows in the preview


def make_card(args: argparse.Namespace, cfg: Config, model: Any, description: ExportedDescription,
              reference: Any, tiles: Sequence[Any], say: Callable[[str], None],
              **facts: Any) -> Dict[str, bytes]:
    """Validate a model, and return the files of its card by name, the README last.

    Args:
        args: Options of tools/export.py.
        cfg: Config that they give.
        model: Model with its weights, on the CPU.
        description: Its description.
        reference: Function that returns scores of windows.
        tiles: Tiles of the validation set.
        say: Function that prints a line.
        facts: ``name``, ``architecture``, ``parameters``, ``gsd`` and ``proof`` of the
            :class:`mapsage.export.card.Card`.
    """
    license_ = license_of(cfg, model, args.card)
    files = {CONFIG: _config_text(args), WEIGHTS: weights_file(model, description),
             PREVIEW: draw(cfg, description, reference, tiles)}
    if license_.text is not None:
        files[LICENSE] = license_.text
    elif license_.dinov3:
        say(f'note: no DINOv3 License lies beside the weights of the training: add a copy as '
            f'{LICENSE}, without which the folder must not be passed on')
    say('validating for the scores of the card')
    card = Card(description=description, validation=validate(cfg, args.checkpoint),
                license=license_, **facts)
    # A name in GBK is no UTF-8.
    return {**files, README: card.to_text().encode('utf-8', 'replace')}


def validate(cfg: Config, checkpoint: str) -> Optional[Validation]:
    """Return the scores of a checkpoint by the config's validation, on the config's device.

    Returns:
        The scores; None if the config has no ``val_evaluator``.
    """
    if not (cfg.get('val_evaluator') and cfg.get('val_dataloader')):
        return None
    cfg = cfg.copy()
    cfg.load_from, cfg.resume = checkpoint, False
    cfg.pop('feature_source', None)  # only training uses it
    # As a test: after a validation, hooks of the training would save what is best.
    cfg.test_dataloader, cfg.test_evaluator = cfg.val_dataloader, cfg.val_evaluator
    cfg.setdefault('test_cfg', dict(type='TestLoop'))
    for key in ('val_dataloader', 'val_evaluator', 'val_cfg'):
        cfg.pop(key, None)
    cfg.log_level = 'WARNING'
    cfg.visualizer = None  # nothing is drawn
    with tempfile.TemporaryDirectory() as folder:
        cfg.work_dir = folder
        runner = cli.build_runner(cfg)
        figures = {name: float(value) for name, value in runner.test().items()
                   if isinstance(value, (int, float))}
        loop: Any = runner.test_loop
        dataset = loop.dataloader.dataset
        matrix = next((metric.matrix for metric in loop.evaluator.metrics
                       if getattr(metric, 'matrix', None) is not None), None)
    classes = None
    if matrix is not None:
        found: Any = score_matrix(matrix)
        classes = list(zip(*(map(float, 100 * found[name]) for name in ('IoU', 'Acc'))))
    return Validation(
        type(dataset).__name__, len(dataset), figures, classes,
        f'{current_accelerator().name}, PyTorch {torch.__version__}',
        datetime.date.today().isoformat())


def weights_file(model: nn.Module, description: ExportedDescription) -> bytes:
    """Return the weights that a prediction needs as a safetensors file, with the classes."""
    from safetensors.torch import save
    state = {name: tensor.detach().cpu().clone().contiguous()
             for name, tensor in model.state_dict().items()
             if not name.startswith('auxiliary_head.')}
    meta = dict(dataset_meta=dict(classes=description.classes, palette=description.palette),
                mapsage_version=description.version, checkpoint=description.checkpoint)
    return save(state, metadata=dict(format='pt', meta=json.dumps(meta)))


def draw(cfg: Config, description: ExportedDescription, reference: Any,
         tiles: Sequence[Any]) -> bytes:
    """Return a PNG of windows of the validation set with labels and predictions."""
    channels = shown_channels(cfg)
    samples: List[PreviewSample] = []
    for number in sorted({at * len(tiles) // _SHOWN for at in range(_SHOWN)}):
        tile = tiles[number]
        found = reference(torch.from_numpy(np.ascontiguousarray(tile.image[None])))[0]
        classes = found.argmax(0) if len(found) > 1 else found[0] > description.threshold
        # Images smaller than the window are mirrored to the right and below, without labels there.
        known = tile.labels != 255
        height, width = (known.any(axis).nonzero()[0].max(initial=-1) + 1 or known.shape[1 - axis]
                         for axis in (1, 0))
        image = tile.image.transpose(1, 2, 0)[:height, :width]
        order = channels or ((2, 1, 0) if image.shape[2] >= 3 else (0, 0, 0))
        samples.append(PreviewSample(
            image[..., list(order)], classes[:height, :width].astype(np.int64),
            tile.labels[:height, :width] if known.any() else None, f'window {number + 1}'))
    picture = render_preview(samples, description.classes, description.palette,
                             'Windows of the validation set')
    return cv2.imencode('.png', picture[:, :, ::-1])[1].tobytes()


def license_of(cfg: Config, model: nn.Module, folder: str) -> License:
    """Return what the pretrained weights that a config names ask of whoever passes them on.

    Weights of DINOv3 go under the DINOv3 License, 1.b: derived ones, too, and with a copy of it.

    Args:
        cfg: Config of the model.
        model: The model.
        folder: Folder of the card, which may have a copy of the license already.
    """
    weights = tuple(dict.fromkeys(_named(cfg.model)))
    if cfg.get('load_from'):
        weights += (str(cfg.load_from), )
    dinov3 = bool(weights) and any(isinstance(each, (DINOv3ConvNeXt, DINOv3ViT))
                                   for each in model.modules())
    return License(tuple(map(os.path.basename, (name.rstrip('/') for name in weights))), dinov3,
                   _license_in([folder, *weights]) if dinov3 else None)


def _named(part: Any) -> Iterator[str]:
    """Yield the checkpoints that the parts of a model begin with."""
    if isinstance(part, (list, tuple)):
        for each in part:
            yield from _named(each)
    elif isinstance(part, dict):
        for key, value in part.items():
            if key in ('checkpoint', 'pretrained') and isinstance(value, str):
                yield value
            else:
                yield from _named(value)


def _license_in(places: Sequence[str]) -> Optional[bytes]:
    """Return the DINOv3 License if it lies in a folder or beside a file of weights.

    Hugging Face's folders of the weights have it.
    """
    for place in places:
        folder = Path(place if os.path.isdir(place) else os.path.dirname(place))
        for path in sorted(folder.glob('LICENSE*')):
            text = path.read_bytes()
            if b'DINOv3 License' in text:
                return text
    return None


def _config_text(args: argparse.Namespace) -> bytes:
    """Return the config as the training read it, without what belongs to this machine alone."""
    cfg = Config.fromfile(args.config)
    if args.cfg_options:
        cfg.merge_from_dict(args.cfg_options)
    for key in ('work_dir', 'load_from', 'resume', 'launcher'):
        cfg.pop(key, None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, CONFIG)
        cfg.dump(str(path))
        return path.read_bytes()
