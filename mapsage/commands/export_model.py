"""A trained model as one ONNX file that proves itself before it is written."""
from __future__ import annotations

import argparse
import copy
import json
import tempfile
from pathlib import Path
from typing import Any, Callable, List, Optional, Tuple

import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import DATASETS, DefaultScope

from mapsage.accelerator import resolve_accelerator
from mapsage.atomic_write import atomic_write
from mapsage.distributed import error_text
from mapsage.engine.loading.dataset_parts import innermost
from mapsage.export.errors import ExportError
from mapsage.export.targets import TARGETS, Target, choose_opset
from mapsage.geo import GeoError, Raster, pixel_side
from mapsage.maps.description import ExportedDescription
from mapsage.maps.model import (
    default_window,
    file_hash,
    find_bands,
    find_classes,
    load_weights,
)
from mapsage.maps.predictor import WindowPredictor
from mapsage.version import __version__

from . import model_card
from .config_checks import build_model, read_config

_SAME_SIDE = 0.01  # national grids and UTM stretch lengths by less, Web Mercator by more
_INSTALL = "pip install 'onnx>=1.15' 'onnxruntime>=1.17'"


def export_model(args: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Write the file that the options ask for, and what lies beside it.

    Args:
        args: ``config``, ``checkpoint``, ``out`` or ``card``, ``target``, ``window``, ``opset``,
            ``batch``, ``gsd``, ``tiles``, ``int8``, ``overwrite``, and what
            :func:`read_config` reads.
        say: Function that prints a line.

    Returns:
        0, the exit status.

    Raises:
        ExportError: If the model cannot be exported, or its export differs.
    """
    out = Path(args.out or Path(args.card, 'model.onnx'))
    beside = [out, Path(f'{out}.json'), out.with_suffix('.stac.json')]
    said: List[str] = []
    say = _noted(say, said)
    _check_names([*beside, *(Path(args.card, name) for name in model_card.FILES if args.card)],
                 args.overwrite)
    try:
        from mapsage.export import graph, metadata, proof
    except ImportError as error:
        raise ExportError(f'{error}: an export needs {_INSTALL}') from error
    cfg, target = read_config(args), TARGETS[args.target]
    if args.int8 and target.name == 'gcu':
        raise ExportError("--int8 with --target gcu: the integers of Enflame's provider for ONNX "
                          'Runtime are not implemented. Leave out --int8; it computes in 16 bits.')
    opset = choose_opset(target, args.opset, graph.most_opset())
    _make_folder(out.parent, '--card' if args.card else '--out')
    model, description, reference = _load(cfg, args, target)
    dataset = build_dataset(cfg)
    # Every second tile calibrates a file in 8 bits, and is not looked at again.
    tiles = proof.take_tiles(dataset, description.window, args.tiles * (2 if args.int8 else 1))
    calibration, tiles = (tiles[::2], tiles[1::2]) if args.int8 else ([], tiles)
    gsd = args.gsd or pixel_meters(dataset)
    with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmseg')):
        file = _proved(out, model, description, reference, target, opset, tiles, say)
    metadata.describe(file, description, gsd)
    if args.int8:
        file = _in_8_bits(file, description, gsd, reference, calibration, tiles, say)
    head = model.decode_head
    architecture = ' + '.join(type(each).__name__ for each in (
        model.backbone, head[-1] if isinstance(head, torch.nn.ModuleList) else head))
    parameters = sum(each.numel() for each in model.parameters())
    item = metadata.mlm_item(file, description, out.stem, out.name, architecture, parameters, gsd)
    card = model_card.make_card(
        args, cfg, model, description, reference, tiles, say,
        name=Path(args.card).absolute().name, architecture=architecture, parameters=parameters,
        gsd=gsd, proof=list(said)) if args.card else {}
    _write([*beside, *(out.with_name(name) for name in card)],
           [file.SerializeToString(), _json(metadata.geoai_sidecar(file, description)),
            _json(item), *card.values()])
    say(f'{out}: image {_shape(description, description.bands.count)} of 0..1 in, scores '
        f'{_shape(description, description.scores)} out')
    say(f'beside it: {beside[1].name} (GeoAI), {beside[2].name} (STAC MLM)'
        + ''.join(f', {name}' for name in card))
    if gsd is None:
        say('note: the size of a pixel is not known, and QGIS asks for it; --gsd METERS says it')
    return 0


def _noted(say: Callable[[str], None], said: List[str]) -> Callable[[str], None]:
    """Return ``say``, made to append its lines to ``said``."""
    def tell(line: str) -> None:
        said.append(line)
        say(line)

    return tell


def _load(cfg: Config, args: argparse.Namespace,
          target: Target) -> Tuple[Any, ExportedDescription, WindowPredictor]:
    """Return the model with its weights, its description, and predict's way to its scores."""
    resolve_accelerator('cpu')
    model: Any = revert_sync_batchnorm(build_model(cfg)).eval()
    meta = load_weights(model, args.checkpoint)
    window, overlap = choose_side(cfg, args.window)
    classes, bands = find_classes(cfg, meta, model), find_bands(cfg, model)
    reference = WindowPredictor(model, torch.device('cpu'), (window, window), 0, 1)
    return model, ExportedDescription(
        classes=classes.names, palette=tuple(map(tuple, classes.palette.tolist())), bands=bands,
        window=window, overlap=overlap, batch=choose_batch(target, args.batch),
        scores=reference.scores, threshold=reference.threshold,
        checkpoint=file_hash(args.checkpoint), target=target.name, version=__version__), reference


def _proved(out: Path, model: Any, description: ExportedDescription, reference: WindowPredictor,
            target: Target, opset: int, tiles: List[Any], say: Callable[[str], None]) -> Any:
    """Return the file of a model in float32.

    Raises:
        ExportError: If it cannot be made, or differs from the model on the tiles.
    """
    from mapsage.export import graph, proof
    from mapsage.export.module import ImageToScores
    module = ImageToScores(model, description.bands, description.window).eval()
    file = graph.trace(module, target, opset, description.batch)
    say(f'opset {opset}, IR {file.ir_version}, {len(file.graph.node)} nodes, '
        f'{file.ByteSize() / 2**20:.1f} MiB, for {target.reader}')
    found = proof.prove(file, description, reference, tiles)
    say(str(found))
    if not found.holds:
        layer = proof.differing_layer(module, opset, tiles[0], description.bands)
        raise ExportError(
            f'{out} is not written: the export differs from the model, by more than '
            f'{proof.MOST_DIFFERENCE:g} or in more than {100 * (1 - proof.LEAST_EQUAL):.1f} % of '
            f'the pixels. ' + (f'The first layer that differs is {layer}.' if layer else
                               'Which layer differs first cannot be told.')
            + ' A forward that decides by values, or keeps a state, cannot be traced.')
    return file


def _in_8_bits(file: Any, description: ExportedDescription, gsd: Optional[float], reference: Any,
               calibration: List[Any], tiles: List[Any], say: Callable[[str], None]) -> Any:
    """Return a file in 8 bits for one in float32.

    Raises:
        ExportError: If it loses too much.
    """
    from mapsage.export import metadata, proof, quantize
    small = quantize.quantize(file, calibration, description.bands, description.batch)
    metadata.describe(small, description, gsd)  # which the quantization leaves out
    found = proof.prove(small, description, reference, tiles)
    say(quantize.describe(found, len(calibration))
        + f'; {small.ByteSize() / 2**20:.1f} MiB')
    if not quantize.is_close(found):
        raise ExportError(f'the file in 8 bits is not written: it loses more than '
                          f'{quantize.MOST_LOSS:g} point of mIoU, or the tiles have no labels. '
                          f'Calibrate on more tiles (--tiles), or leave out --int8.')
    return small


def choose_side(cfg: Config, asked: Optional[int]) -> Tuple[int, int]:
    """Return the side of the windows, and the pixels that neighbors share, as predict chooses them.

    Raises:
        ExportError: If the windows of the training are no squares.
    """
    (height, width), why = default_window(cfg) if asked is None else ((asked, asked), '--window')
    if height != width:
        raise ExportError(f'windows of {width}x{height} pixels ({why}): an exported model takes '
                          f'squares. Choose their side with --window.')
    if height < 1:
        raise ExportError(f'--window {height}: expected 1 pixel or more.')
    return height, height // 4


def choose_batch(target: Target, asked: Optional[int]) -> Optional[int]:
    """Return the number of windows in a batch; None for any.

    Raises:
        ExportError: If it is no number of windows.
    """
    if asked is not None and asked < 1:
        raise ExportError(f'--batch {asked}: expected 1 or more.')
    return target.batch if asked is None else asked


def build_dataset(cfg: Config) -> Any:
    """Return the validation set of a config, else its test set.

    Raises:
        ExportError: If there is none, it cannot be built, or it is empty.
    """
    loader = next((cfg.get(name) for name in ('val_dataloader', 'test_dataloader')
                   if (cfg.get(name) or {}).get('dataset')), None)
    if loader is None:
        raise ExportError('the config has no val_dataloader, on whose tiles the file is compared '
                          'with the model. Add one.')
    try:
        with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmseg')):
            dataset = DATASETS.build(copy.deepcopy(loader['dataset']))
    except Exception as error:  # of any dataset that the user names
        raise ExportError(
            f'the validation set, on whose tiles the file is compared with the model, cannot be '
            f'read: {error_text(error)}. Point it at the data with --cfg-options '
            f'val_dataloader.dataset.data_root=DIR.') from error
    if not len(dataset):
        raise ExportError('the validation set is empty, and the file cannot be compared.')
    return dataset


def pixel_meters(dataset: Any) -> Optional[float]:
    """Return the side in meters of a pixel of a dataset's first image; None if it has no place.

    Args:
        dataset: Dataset of images or of scenes, also in wrappers.
    """
    inner, index = innermost(dataset, 0)
    info = inner.get_data_info(index) if hasattr(inner, 'get_data_info') else {}
    path = info.get('scene') or info.get('img_path')  # a window of a scene, or an image file
    if path is None:
        return None
    try:
        raster = Raster(path)
    except GeoError:  # an image that GDAL does not read has no place
        return None
    side = pixel_side(raster)
    # Deepness resamples a scene whose pixels are not just as large in the units of its CRS, and a
    # UTM meter is one of the ground to within 0.1 %.
    if raster.crs is not None and raster.crs.is_projected:
        nominal = abs(raster.transform.determinant)**0.5 * raster.crs.linear_units_factor[1]
        side = nominal if abs(nominal / side - 1) < _SAME_SIDE else side
    return float(side) if side > 0 else None


def _check_names(paths: List[Path], overwrite: bool) -> None:
    if paths[0].suffix != '.onnx':
        raise ExportError(f'--out {paths[0]}: expected a name that ends in .onnx.')
    for path in paths:
        if path.is_dir():
            raise ExportError(f'{path} is a folder: give another name.')
        if path.exists() and not overwrite:
            raise ExportError(f'{path} exists already: give another name, or add --overwrite.')


def _make_folder(folder: Path, option: str) -> None:
    """Make the folder that an option names, or raise an error before the work, not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=str(folder)):
            pass
    except OSError as error:
        raise ExportError(f'{option}: cannot write into {folder}: {error.strerror}. Name a folder '
                          f'that is new or can be written.') from error


def _write(paths: List[Path], contents: List[bytes]) -> None:
    """Write all files, the model last, so that whoever sees it finds what belongs to it."""
    try:
        for path, content in reversed(list(zip(paths, contents))):
            atomic_write(path, content)
    except OSError as error:
        raise ExportError(f'cannot write {paths[0]}: {error}. Free space there, or write '
                          f'elsewhere.') from error


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=1) + '\n').encode()


def _shape(description: ExportedDescription, channels: int) -> str:
    side = description.window
    return f'[{description.batch or "batch"}, {channels}, {side}, {side}]'
