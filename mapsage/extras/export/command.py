"""tools/export.py: a trained model as one ONNX file, written only after it was compared.

The order of work: check the names, load the model, make and prove the file (`proved_file.py`),
write it with its sidecars and, with `--card`, its model card (`model_card.py`). ONNX is imported
inside `export_model`, so that a missing package is an error with the command that installs it.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import DATASETS, DefaultScope
from mmseg.models.segmentors import BaseSegmentor

from mapsage.accelerator import resolve_accelerator
from mapsage.base.files import atomic_write
from mapsage.commands.configs import build_model, read_config
from mapsage.distributed import error_text
from mapsage.extras.export.errors import ExportError
from mapsage.extras.export.targets import Target, choose_opset, choose_target
from mapsage.geo import GeoError, Raster, pixel_side
from mapsage.host.dataset_parts import innermost, lists_samples
from mapsage.maps.description import ExportedDescription
from mapsage.maps.file_inputs import inputs_of, layout_of
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

from . import model_card

# National grids and UTM stretch lengths by less than this share, Web Mercator by more.
_SAME_SIDE = 0.01
_INSTALL = "pip install 'onnx>=1.15' 'onnxruntime>=1.17'"


def export_model(args: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Write an exported model, its sidecars and, if the options name one, its card.

    Args:
        args: ``config``, ``checkpoint``, ``out`` or ``card``, ``target``, ``window``, ``opset``,
            ``batch``, ``gsd``, ``tiles``, ``int8``, ``overwrite``, and the arguments of
            :func:`read_config`.
        say: Function that prints a line.

    Returns:
        0, the exit status.

    Raises:
        ExportError: If the model cannot be exported, or its export differs from it.
    """
    out = Path(args.out or Path(args.card, 'model.onnx'))
    geoai, stac = Path(f'{out}.json'), out.with_suffix('.stac.json')
    messages: List[str] = []
    say = _recorded(say, messages)
    card_files = [Path(args.card, name) for name in model_card.FILES] if args.card else []
    _check_names([out, geoai, stac, *card_files], args.overwrite)
    try:
        from mapsage.extras.export import graph, metadata, proof, proved_file
    except ImportError as error:
        raise ExportError(f'{error}: an export needs {_INSTALL}') from error
    cfg = read_config(args)
    target = choose_target(args.target, place_settings(cfg) is not None)
    if args.int8 and target.name == 'gcu':
        raise ExportError(
            "--int8 with --target gcu: the integers of Enflame's provider for ONNX "
            'Runtime are not implemented. Leave out --int8; it computes in 16 bits.'
        )
    if args.int8 and place_settings(cfg) is not None:
        raise ExportError(
            '--int8: models of several dates are written in float32 only, because '
            'days and pixels would be integers of one scale. Leave out --int8.'
        )
    opset = choose_opset(target, args.opset, graph.most_opset())
    _make_folder(out.parent, '--card' if args.card else '--out')
    model, meta, description, reference = _load(cfg, args, target)
    dataset = build_dataset(cfg)
    # Every second tile calibrates a file in 8 bits; such a tile is not used for the comparison.
    tiles = proof.take_tiles(
        dataset,
        description.window,
        args.tiles * (2 if args.int8 else 1),
        layout_of(description.places),
    )
    calibration, tiles = (tiles[::2], tiles[1::2]) if args.int8 else ([], tiles)
    gsd = args.gsd or pixel_meters(dataset)
    with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmseg')):
        file = proved_file.export_float32(
            out, model, description, reference, target, opset, tiles, gsd, say
        )
    if args.int8:
        file = proved_file.export_int8(file, description, gsd, reference, calibration, tiles, say)
    architecture = _architecture(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    item = metadata.mlm_item(file, description, out.stem, out.name, architecture, parameters, gsd)
    card = (
        model_card.make_card(
            args,
            cfg,
            model,
            meta,
            description,
            reference,
            tiles,
            say,
            name=Path(args.card).absolute().name,
            architecture=architecture,
            parameters=parameters,
            gsd=gsd,
            proof=list(messages),
        )
        if args.card
        else {}
    )
    files = {
        out: file.SerializeToString(),
        stac: _json(item),
        **{out.with_name(name): content for name, content in card.items()},
    }
    kinds = {stac: ' (STAC MLM)'}
    # GeoAI reads images of one date.
    if description.places is None:
        files[geoai], kinds[geoai] = _json(metadata.geoai_sidecar(file, description)), ' (GeoAI)'
    _write(files)
    for line in describe_file(out, file, description):
        say(line)
    say(
        'beside it: '
        + ', '.join(f'{path.name}{kinds.get(path, "")}' for path in files if path != out)
    )
    if gsd is None and target.name == 'qgis':
        say('note: the size of a pixel is not known, and QGIS asks for it; --gsd METERS says it')
    return 0


def _recorded(say: Callable[[str], None], messages: List[str]) -> Callable[[str], None]:
    """Return a function that calls ``say`` and also appends the line to ``messages``."""

    def say_and_record(line: str) -> None:
        messages.append(line)
        say(line)

    return say_and_record


def _load(
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
        ),
        reference,
    )


def _architecture(model: BaseSegmentor) -> str:
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


def _check_names(paths: Sequence[Path], overwrite: bool) -> None:
    if paths[0].suffix != '.onnx':
        raise ExportError(f'--out {paths[0]}: expected a name that ends in .onnx.')
    for path in paths:
        if path.is_dir():
            raise ExportError(f'{path} is a folder: give another name.')
        if path.exists() and not overwrite:
            raise ExportError(f'{path} exists already: give another name, or add --overwrite.')


def _make_folder(folder: Path, option: str) -> None:
    """Create the folder of an option; raise an error now, and not after the work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=str(folder)):
            pass
    except OSError as error:
        raise ExportError(
            f'{option}: cannot write into {folder}: {error.strerror}. Name a folder '
            f'that is new or can be written.'
        ) from error


def _write(files: Mapping[Path, bytes]) -> None:
    """Write all files, the first one last, so that a program that waits for it finds the others."""
    try:
        for path, content in reversed(list(files.items())):
            atomic_write(path, content)
    except OSError as error:
        raise ExportError(
            f'cannot write {next(iter(files))}: {error}. Free space there, or write elsewhere.'
        ) from error


def _json(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=1) + '\n').encode()


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
