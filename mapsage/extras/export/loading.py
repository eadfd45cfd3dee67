"""What an export is made from: the model, the tiles that it is compared on, the size of a pixel."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import DATASETS, DefaultScope
from mmseg.models.segmentors import BaseSegmentor

from mapsage.accelerator import resolve_accelerator
from mapsage.commands.cli import build_model
from mapsage.distributed import error_text
from mapsage.extras.export.errors import ExportError
from mapsage.extras.export.targets import Target
from mapsage.geo import GeoError, Raster, pixel_side
from mapsage.geo.passport import passport_of_checkpoint
from mapsage.host.dataset_parts import innermost, lists_samples
from mapsage.maps.description import ExportedDescription
from mapsage.maps.file_inputs import inputs_of
from mapsage.maps.model import (
    default_window,
    file_hash,
    find_bands,
    find_classes,
    load_weights,
    place_settings,
    training_days,
)
from mapsage.maps.predictor import WindowPredictor
from mapsage.version import __version__

# National grids and UTM stretch lengths by less than this share, Web Mercator by more.
_SAME_SIDE = 0.01


def load(
    cfg: Config, args: argparse.Namespace, target: Target
) -> Tuple[BaseSegmentor, Dict[str, Any], ExportedDescription, WindowPredictor]:
    """Return the model, the checkpoint's meta, a description, and the scores of predict.py."""
    resolve_accelerator('cpu')
    model = revert_sync_batchnorm(build_model(cfg)).eval()
    meta = load_weights(model, args.checkpoint)
    window, overlap = choose_side(cfg, args.window)
    places = place_settings(cfg)
    if places is not None:
        places['training_days'] = training_days(meta)
    classes, bands = find_classes(cfg, meta, model), find_bands(cfg, model)
    reference = WindowPredictor(model, torch.device('cpu'), (window, window), 0, 1)
    return (
        model,
        meta,
        ExportedDescription(
            classes=classes.names,
            palette=tuple(map(tuple, classes.palette.tolist())),
            bands=bands,
            window=window,
            overlap=overlap,
            batch=choose_batch(target, args.batch),
            scores=reference.scores,
            threshold=reference.threshold,
            checkpoint=file_hash(args.checkpoint),
            target=target.name,
            version=__version__,
            places=places,
            passport=passport_of_checkpoint(meta, args.checkpoint)[0],
        ),
        reference,
    )


def architecture(model: BaseSegmentor) -> str:
    """Return the class names of backbone and decode head, the last head of a cascade."""
    head = model.decode_head
    head = head[-1] if isinstance(head, torch.nn.ModuleList) else head
    return f'{type(model.backbone).__name__} + {type(head).__name__}'


def choose_side(cfg: Config, side: Optional[int]) -> Tuple[int, int]:
    """Return the side of the windows and the overlap of neighbors, as tools/predict.py does.

    Args:
        cfg: Config of the model.
        side: Side in pixels that the user chose, or None.

    Raises:
        ExportError: If the windows of the training are not square, or have no pixel.
    """
    (height, width), origin = default_window(cfg) if side is None else ((side, side), '--window')
    if height != width:
        raise ExportError(
            f'windows of {width}x{height} pixels ({origin}): an exported model takes '
            f'squares. Choose their side with --window.'
        )
    if height < 1:
        raise ExportError(f'--window {height}: expected 1 pixel or more.')
    return height, height // 4


def choose_batch(target: Target, number: Optional[int]) -> Optional[int]:
    """Return the number of windows in a batch; None for any number.

    Args:
        target: Target of the export.
        number: Number that the user chose, or None.

    Raises:
        ExportError: If the user's number is less than 1.
    """
    if number is not None and number < 1:
        raise ExportError(f'--batch {number}: expected 1 or more.')
    return target.batch if number is None else number


def build_dataset(cfg: Config) -> BaseDataset:
    """Return the validation dataset of a config, or else its test dataset.

    Raises:
        ExportError: If the config has neither, or the dataset cannot be built or is empty.
    """
    loader = next(
        (
            cfg.get(name)
            for name in ('val_dataloader', 'test_dataloader')
            if (cfg.get(name) or {}).get('dataset')
        ),
        None,
    )
    if loader is None:
        raise ExportError(
            'the config has no val_dataloader, on whose tiles the file is compared '
            'with the model. Add one.'
        )
    try:
        with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmseg')):
            dataset = DATASETS.build(copy.deepcopy(loader['dataset']))
    # A user's dataset class may raise anything.
    except Exception as error:
        raise ExportError(
            f'the validation set, on whose tiles the file is compared with the model, cannot be '
            f'read: {error_text(error)}. Point it at the data with --cfg-options '
            f'val_dataloader.dataset.data_root=DIR.'
        ) from error
    if not len(dataset):
        raise ExportError('the validation set is empty, and the file cannot be compared.')
    return dataset


def pixel_meters(dataset: Any) -> Optional[float]:
    """Return the side in meters of a pixel of the first image; None without georeference.

    Args:
        dataset: Dataset of images or of scenes, wrapped or not.
    """
    inner, index = innermost(dataset, 0)
    info = inner.get_data_info(index) if lists_samples(inner) else {}
    # A window of a scene, or an image file.
    path = info.get('scene') or info.get('img_path')
    if path is None:
        return None
    try:
        raster = Raster(path)
    # GDAL cannot read this image file, so it has no georeference.
    except GeoError:
        return None
    side = pixel_side(raster)
    # Deepness resamples a scene unless its pixels have exactly this size in the units of its CRS.
    # The UTM meter differs from a meter on the ground by at most 0.1 %, so take the nominal size.
    if raster.crs is not None and raster.crs.is_projected:
        nominal = abs(raster.transform.determinant) ** 0.5 * raster.crs.linear_units_factor[1]
        side = nominal if abs(nominal / side - 1) < _SAME_SIDE else side
    return float(side) if side > 0 else None


def describe_file(out: Path, file: Any, description: ExportedDescription) -> List[str]:
    """Return the lines that tell the user the inputs and the output of a file.

    Args:
        out: Path of the file.
        file: The file, an ``onnx.ModelProto``.
        description: Description of the file.
    """
    inputs = inputs_of(description)
    shapes = {
        value.name: _shape(description, *inputs.shapes[value.name]) for value in file.graph.input
    }
    side = description.window
    scores = f'scores {_shape(description, description.scores, side, side)} out'
    if description.places is None:
        return [f'{out}: image {shapes["image"]} of 0..1 in, {scores}']
    return [
        f'{out}: all float32, {scores}, and in',
        *(f'  {name} {shape}' for name, shape in shapes.items()),
    ]


def _shape(description: ExportedDescription, *sides: int) -> str:
    return f'[{", ".join(map(str, (description.batch or "batch", *sides)))}]'
