"""Files of a model card next to an exported model: README, weights, config, preview, license.

The scores of the card come from a validation of the checkpoint with the config's own evaluator, on
the config's device; everything else is collected from config and model. The text of the README is
in `mapsage/extras/export/card.py`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence

import cv2
import numpy as np
import torch
from mmengine.config import Config
from torch import nn

from mapsage.accelerator import current_accelerator
from mapsage.commands import cli
from mapsage.evaluation.confusion_matrix import scores as score_matrix
from mapsage.evaluation.confusion_matrix_metric import ConfusionMatrixMetric
from mapsage.extras.export.card import (
    CONFIG,
    LICENSE,
    PREVIEW,
    README,
    WEIGHTS,
    Card,
    License,
    Validation,
)
from mapsage.extras.export.proof import Tile
from mapsage.host.batch_images import shown_channels
from mapsage.maps.description import ExportedDescription
from mapsage.maps.predictor import WindowPredictor
from mapsage.models import DINOv3ConvNeXt, DINOv3ViT
from mapsage.models.weight_license import LICENSES_KEY, find_licenses, recorded_licenses
from mapsage.pictures.preview import PreviewSample, render_preview

FILES = (README, CONFIG, WEIGHTS, PREVIEW, LICENSE)
# Number of windows in the preview.
_SHOWN = 4


def make_card(
    args: argparse.Namespace,
    cfg: Config,
    model: nn.Module,
    meta: Mapping[str, Any],
    description: ExportedDescription,
    reference: WindowPredictor,
    tiles: Sequence[Tile],
    say: Callable[[str], None],
    *,
    name: str,
    architecture: str,
    parameters: int,
    gsd: Optional[float],
    proof: Sequence[str],
) -> Dict[str, bytes]:
    """Validate a model and return the files of its card: file name -> content, the README last.

    Args:
        args: Options of tools/export.py.
        cfg: Config of the model.
        model: Model with its weights, on the CPU.
        meta: ``meta`` of the checkpoint.
        description: Description of the exported file.
        reference: The model's scores of windows.
        tiles: Tiles of the validation set.
        say: Function that prints a line.
        name, architecture, parameters, gsd, proof: Attributes of the
            :class:`mapsage.extras.export.card.Card`.
    """
    license_ = license_of(cfg, model, args.card, meta)
    files = {
        CONFIG: _config_text(args),
        WEIGHTS: weights_file(model, description, license_),
        PREVIEW: draw(cfg, description, reference, tiles),
    }
    if license_.text is not None:
        files[LICENSE] = license_.text
    elif license_.dinov3:
        say(
            f'note: no DINOv3 License lies beside the weights of the training: add a copy as '
            f'{LICENSE}, without which the folder must not be passed on'
        )
    say('validating for the scores of the card')
    card = Card(
        description=description,
        validation=validate(cfg, args.checkpoint),
        license=license_,
        name=name,
        architecture=architecture,
        parameters=parameters,
        gsd=gsd,
        proof=list(proof),
    )
    # A file name in GBK cannot be encoded as UTF-8.
    return {**files, README: card.to_text().encode('utf-8', 'replace')}


def validate(cfg: Config, checkpoint: str) -> Optional[Validation]:
    """Return the scores of a checkpoint in the config's validation, on the config's device.

    Returns:
        The scores; None if the config has no validation.
    """
    if not (cfg.get('val_evaluator') and cfg.get('val_dataloader')):
        return None
    cfg = cfg.copy()
    cfg.load_from, cfg.resume = checkpoint, False
    # Only trainings use it.
    cfg.pop('feature_source', None)
    # Run as a test, because hooks of the training would save the best checkpoint of a validation.
    cfg.test_dataloader, cfg.test_evaluator = cfg.val_dataloader, cfg.val_evaluator
    cfg.setdefault('test_cfg', dict(type='TestLoop'))
    for key in ('val_dataloader', 'val_evaluator', 'val_cfg'):
        cfg.pop(key, None)
    cfg.log_level = 'WARNING'
    # Without predictions on disk.
    cfg.visualizer = None
    with tempfile.TemporaryDirectory() as folder:
        cfg.work_dir = folder
        runner = cli.build_runner(cfg)
        figures = {
            name: float(value)
            for name, value in runner.test().items()
            if isinstance(value, (int, float))
        }
        loop: Any = runner.test_loop
        dataset = loop.dataloader.dataset
        matrix = next(
            (
                metric.matrix
                for metric in loop.evaluator.metrics
                if isinstance(metric, ConfusionMatrixMetric)
            ),
            None,
        )
    classes = None
    if matrix is not None:
        class_scores: Any = score_matrix(matrix)
        classes = list(zip(*(map(float, 100 * class_scores[name]) for name in ('IoU', 'Acc'))))
    return Validation(
        type(dataset).__name__,
        len(dataset),
        figures,
        classes,
        f'{current_accelerator().name}, PyTorch {torch.__version__}',
        datetime.date.today().isoformat(),
    )


def weights_file(model: nn.Module, description: ExportedDescription, license_: License) -> bytes:
    """Return a safetensors file of the weights that a prediction needs, the classes, licenses."""
    from safetensors.torch import save

    state = {
        name: tensor.detach().cpu().clone().contiguous()
        for name, tensor in model.state_dict().items()
        if not name.startswith('auxiliary_head.')
    }
    meta: Dict[str, Any] = dict(
        dataset_meta=dict(
            classes=description.classes,
            palette=description.palette,
            **(
                {}
                if description.places is None
                else dict(stack_days=description.places['training_days'])
            ),
        ),
        mapsage_version=description.version,
        checkpoint=description.checkpoint,
    )
    if license_.published:
        meta[LICENSES_KEY] = [published._asdict() for published in license_.published]
    return save(state, metadata=dict(format='pt', meta=json.dumps(meta)))


def draw(
    cfg: Config,
    description: ExportedDescription,
    reference: Callable[[torch.Tensor], np.ndarray],
    tiles: Sequence[Tile],
) -> bytes:
    """Return a PNG with labels and predictions of some windows of the validation set."""
    channels = shown_channels(cfg)
    samples: List[PreviewSample] = []
    for number in sorted({step * len(tiles) // _SHOWN for step in range(_SHOWN)}):
        tile = tiles[number]
        scores = reference(torch.from_numpy(np.ascontiguousarray(tile.image[None])))[0]
        classes = scores.argmax(0) if len(scores) > 1 else scores[0] > description.threshold
        # An image smaller than the window is mirrored to the right and below. The mirrored pixels
        # have no label, so the labels tell the size of the image.
        known = tile.labels != 255
        height, width = (
            known.any(axis).nonzero()[0].max(initial=-1) + 1 or known.shape[1 - axis]
            for axis in (1, 0)
        )
        image = tile.image.transpose(1, 2, 0)[:height, :width]
        order = channels or ((2, 1, 0) if image.shape[2] >= 3 else (0, 0, 0))
        samples.append(
            PreviewSample(
                image[..., list(order)],
                classes[:height, :width].astype(np.int64),
                tile.labels[:height, :width] if known.any() else None,
                f'window {number + 1}',
            )
        )
    picture = render_preview(
        samples, description.classes, description.palette, 'Windows of the validation set'
    )
    return cv2.imencode('.png', picture[:, :, ::-1])[1].tobytes()


def license_of(cfg: Config, model: nn.Module, folder: str, meta: Mapping[str, Any]) -> License:
    """Return the licenses of the pretrained weights that a config or a checkpoint names.

    By section 1.b of the DINOv3 License, weights derived from DINOv3 may be distributed only under
    this license and with a copy of it.

    Args:
        cfg: Config of the model.
        model: The model.
        folder: Folder of the card, which may contain a copy of the license already.
        meta: ``meta`` of the checkpoint.
    """
    weights = tuple(dict.fromkeys(_checkpoint_names(cfg.model)))
    if cfg.get('load_from'):
        weights += (str(cfg.load_from),)
    dinov3 = bool(weights) and any(
        isinstance(module, (DINOv3ConvNeXt, DINOv3ViT)) for module in model.modules()
    )
    return License(
        tuple(map(os.path.basename, (name.rstrip('/') for name in weights))),
        dinov3,
        _find_license([folder, *weights]) if dinov3 else None,
        tuple(dict.fromkeys(find_licenses(model) + recorded_licenses(meta))),
    )


def _checkpoint_names(config: object) -> Iterator[str]:
    """Yield the names of all pretrained checkpoints in a model's config, at any depth."""
    if isinstance(config, (list, tuple)):
        for item in config:
            yield from _checkpoint_names(item)
    elif isinstance(config, dict):
        for key, value in config.items():
            if key in ('checkpoint', 'pretrained') and isinstance(value, str):
                yield value
            else:
                yield from _checkpoint_names(value)


def _find_license(paths: Sequence[str]) -> Optional[bytes]:
    """Return the DINOv3 License from one of these folders or files' folders, or None.

    Hugging Face's folders of the weights contain the license.
    """
    for weights_path in paths:
        folder = Path(
            weights_path if os.path.isdir(weights_path) else os.path.dirname(weights_path)
        )
        for path in sorted(folder.glob('LICENSE*')):
            text = path.read_bytes()
            if b'DINOv3 License' in text:
                return text
    return None


def _config_text(args: argparse.Namespace) -> bytes:
    """Return the config of the training, without the keys that are about one machine or run."""
    cfg = Config.fromfile(args.config)
    if args.cfg_options:
        cfg.merge_from_dict(args.cfg_options)
    for key in ('work_dir', 'load_from', 'resume', 'launcher'):
        cfg.pop(key, None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, CONFIG)
        cfg.dump(str(path))
        return path.read_bytes()
