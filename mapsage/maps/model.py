"""Weights, classes, bands and window size of a model, from its config and its checkpoint.

Everything that `description.py` names is found out here for a model that was not exported. Datasets
are often wrapped or concatenated in configs; `_unwrapped_dataset` looks through the wrappers, so
that the innermost dataset's keys are read.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from typing import Any, Dict, List, Mapping, Optional, Tuple, cast

from mmengine.config import Config
from mmengine.logging import print_log
from mmengine.registry import DATASETS
from mmengine.runner import CheckpointLoader
from torch import nn

from mapsage.models.checkpoint_fit import CheckpointFitError, check_whole, plain_weights
from mapsage.models.frozen_weights import FrozenWeightsError, restore_left_out
from mapsage.models.weight_license import describe_restrictions
from mapsage.pictures.tiles import class_palette

from .blending import NO_DATA
from .description import Bands, Classes
from .errors import PredictError

DEFAULT_WINDOW = 512
# Settings of a dataset that say which files a place has, and how they are read.
_PLACE_SETTINGS = ('sensors', 'grid', 'max_shift', 'units')


def load_weights(model: nn.Module, path: str) -> Dict[str, Any]:
    """Load a checkpoint into ``model`` and return the checkpoint's ``meta``.

    The log says what the licenses of the weights forbid that the checkpoint was trained from.

    Args:
        model: Model whose weights are replaced.
        path: Path of the checkpoint, a local file.

    Raises:
        PredictError: If the checkpoint cannot be read, or its weights do not fit the model.
    """
    checkpoint = read_checkpoint(path)
    try:
        restore_left_out(model, checkpoint, f'checkpoint {path}')
    except FrozenWeightsError as error:
        raise PredictError(str(error)) from error
    try:
        weights = plain_weights(checkpoint, path)
        check_whole(model, weights, path)
    except CheckpointFitError as error:
        raise PredictError(str(error)) from error
    meta = checkpoint.get('meta') or {}
    if not isinstance(meta, dict):
        raise PredictError(f'checkpoint {path} is damaged: its meta is {str(meta)[:80]}.')
    model.load_state_dict(weights, strict=False)
    restrictions = describe_restrictions(meta, path)
    if restrictions:
        print_log(restrictions, logger='current')
    return meta


def read_checkpoint(path: str) -> Dict[str, Any]:
    """Return the content of a checkpoint, a local file.

    Raises:
        PredictError: If it cannot be read.
    """
    if '://' in path:
        raise PredictError(f'checkpoint {path!r} is not a local file. Download it first.')
    try:
        return CheckpointLoader.load_checkpoint(path, map_location='cpu')
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise PredictError(f'checkpoint {path} cannot be read: {error}') from error


def find_classes(cfg: Config, meta: Dict[str, Any], model: nn.Module) -> Classes:
    """Return the classes in the checkpoint's metadata, or else the classes of the config's data.

    Args:
        cfg: Config of the run.
        meta: ``meta`` of the checkpoint.
        model: Model with an attribute ``num_classes``.

    Raises:
        PredictError: If neither names classes, or their number differs from the model's.
    """
    count = int(cast(Any, model).num_classes)
    if count == 1:
        raise PredictError(
            'the decode head has num_classes=1, but a map also needs a class for '
            'everything else. Set num_classes=2 (out_channels=1 may stay) and name '
            'both classes.'
        )
    for source, metainfo in (
        ("the checkpoint's dataset_meta", meta.get('dataset_meta')),
        ("the config's dataset", _dataset_meta(cfg)),
    ):
        metainfo = metainfo if isinstance(metainfo, Mapping) else {}
        names = metainfo.get('classes')
        if not isinstance(names, (list, tuple)) or not names:
            continue
        if len(names) != count:
            raise PredictError(
                f'the model has {count} classes, but {source} names {len(names)}: '
                f'{", ".join(map(str, names[:10]))}. Correct num_classes of the '
                f'decode head or the metainfo of the dataset.'
            )
        if count >= NO_DATA:
            raise PredictError(f'{count} classes do not fit a map of 8 bits: at most {NO_DATA}.')
        try:
            palette = class_palette(count, metainfo.get('palette'))
        except (TypeError, ValueError) as error:
            raise PredictError(f'{source} has a palette that cannot be used: {error}') from error
        return Classes(tuple(map(str, names)), palette)
    raise PredictError(
        "neither the checkpoint nor the config's test_dataloader names classes. Set "
        "metainfo=dict(classes=[...], palette=[...]) in the config's test_dataloader.dataset."
    )


def find_bands(cfg: Config, model: nn.Module) -> Bands:
    """Return the number of bands that the model takes, and how its test pipeline loads them.

    Raises:
        PredictError: If the order of bands depends on the file (``color_type='unchanged'``).
    """
    mean = getattr(model.data_preprocessor, 'mean', None)
    count = 0 if mean is None else int(mean.numel())
    # A single mean applies to any number of bands; then the first convolution tells the number.
    if count < 2:
        convolution = next(
            (module for module in model.modules() if isinstance(module, nn.Conv2d)), None
        )
        count = 3 if convolution is None else convolution.in_channels * convolution.groups
    steps = _test_pipeline(cfg)
    names = [_type_name(step) for step in steps]
    loader = steps[0] if steps else {}
    color_type = loader.get('color_type', 'color')
    # The backend tifffile keeps the order of the file, all others return blue, green, red.
    by_opencv = (not names or names[0] == 'LoadImageFromFile') and loader.get(
        'imdecode_backend'
    ) != 'tifffile'
    if by_opencv and count > 1 and color_type not in ('color', 'color_ignore_orientation'):
        raise PredictError(
            f'the test pipeline has LoadImageFromFile(color_type={color_type!r}) '
            f'and the model takes {count} bands: which band comes first depends on '
            "the file. Use color_type='color', or train on scenes with "
            'GeoTiffDataset.'
        )
    like_opencv = count == 3 and by_opencv
    ignored = tuple(
        name for name in names[1:] if not name.startswith(('Load', 'Pack', 'Collect', 'Resize'))
    )
    resize = next((dict(step) for step, name in zip(steps, names) if name == 'Resize'), None)
    # A key of GeoTiffDataset.
    chosen = _dataset(cfg).get('bands')
    # The backbones of MapSage keep `bands=dict(rgb=...)` of the config here.
    colors = tuple(getattr(getattr(model, 'backbone', None), 'rgb', None) or ())
    names_colors = count > 3 and len(colors) == 3 and None not in colors
    return Bands(
        count,
        like_opencv,
        tuple(chosen) if chosen else None,
        ignored,
        loader.get('imdecode_backend'),
        color_type,
        resize,
        colors if names_colors else None,
        units=_dataset(cfg).get('units', 'stored'),
    )


def default_window(cfg: Config) -> Tuple[Tuple[int, int], str]:
    """Return the height and width of the training images, and the name of the setting they are in.

    The first of these settings in the config decides: the crop size of the model's sliding test,
    the windows that the training reads from scenes (or the size of a ``RandomCrop`` in them),
    ``crop_size``, the size of the preprocessor. Without any of them, :data:`DEFAULT_WINDOW`.
    """
    model = cfg.model
    preprocessor = model.get('data_preprocessor') or cfg.get('data_preprocessor') or {}
    for size, setting in (
        ((model.get('test_cfg') or {}).get('crop_size'), "crop_size of the model's test_cfg"),
        _dataset_window(cfg),
        (cfg.get('crop_size'), 'crop_size'),
        (preprocessor.get('size'), 'size of the data_preprocessor'),
    ):
        if size:
            height, width = (size, size) if isinstance(size, int) else size
            return (int(height), int(width)), f'{setting} in the config'
    return (DEFAULT_WINDOW, DEFAULT_WINDOW), 'the default: the config names no size'


def _dataset_window(cfg: Config) -> Tuple[Any, str]:
    """Return the window size of a dataset of scenes and its setting; None if there is no such."""
    for loader in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        dataset = _unwrapped_dataset(cfg, loader)
        if not isinstance(dataset.get('window'), int):
            continue
        crops = [
            step.get('crop_size')
            for step in dataset.get('pipeline') or []
            if _type_name(step) == 'RandomCrop'
        ]
        return (
            (crops[-1], f"RandomCrop of the {loader}'s dataset")
            if crops and crops[-1]
            else (dataset['window'], f"window of the {loader}'s dataset")
        )
    return None, ''


def file_hash(path: str) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(os.path.expanduser(path), 'rb') as file:
        for block in iter(lambda: file.read(1 << 20), b''):
            digest.update(block)
    return digest.hexdigest()


def settings_of(cfg: Config) -> str:
    """Return, as text, all settings of the config that decide the scores of a window."""
    settings = dict(
        model=cfg.model,
        data_preprocessor=cfg.get('data_preprocessor'),
        loader=_test_pipeline(cfg)[:1],
    )
    # The memory layout decides the last bits of the scores.
    if (cfg.get('env_cfg') or {}).get('channels_last'):
        settings['channels_last'] = True
    return repr(Config(settings).to_dict())


def place_settings(cfg: Config) -> Optional[Dict[str, Any]]:
    """Return the settings of the places that a model takes, or None for a model of single scenes.

    Returns:
        ``type``, the name of the dataset's class, its ``sensors``, and the other settings that
        ``mapsage.maps.places.open_places`` reads.
    """
    model, dataset = cfg.get('model') or {}, _dataset(cfg)
    preprocessor = model.get('data_preprocessor') or cfg.get('data_preprocessor') or {}
    settings = {key: dataset[key] for key in _PLACE_SETTINGS if key in dataset}
    if not settings.get('sensors'):
        if not preprocessor.get('sensors'):
            return None
        settings['sensors'] = preprocessor['sensors']
    return Config(dict(settings, type=_type_name(dataset))).to_dict()


def check_labeling(cfg: Config, subject: str) -> None:
    """Check that the labels of a model's datasets can be found for the inputs of a command.

    Args:
        cfg: Config of the model.
        subject: Command or option.

    Raises:
        PredictError: If the model takes pairs of scenes, or its places have the grid of labels.
    """
    settings = place_settings(cfg) or {}
    if settings.get('type') == 'ChangeDataset':
        raise PredictError(
            f'{subject} takes models of scenes and of places, and this model takes '
            f'pairs of scenes. predict.py --confidence shows where it is unsure.'
        )
    if settings.get('grid') == 'labels':
        raise PredictError(
            f'{subject} needs places with the same grid with and without labels, '
            f"and the config has grid='labels'. Train with labels on the grid of a "
            f'sensor, such as grid={sorted(settings["sensors"])[0]!r}.'
        )


def training_days(meta: Mapping[str, Any]) -> Dict[str, List[int]]:
    """Return the days of the year that a training on scene stacks had, by sensor.

    Args:
        meta: ``meta`` of a checkpoint.
    """
    metainfo = meta.get('dataset_meta')
    days = metainfo.get('stack_days') if isinstance(metainfo, Mapping) else None
    return dict(days) if isinstance(days, Mapping) else {}


def _type_name(config: Mapping[str, Any]) -> str:
    """Return the name of the class in a config, which may name its module or be the class."""
    return str(config.get('type')).rsplit('.', 1)[-1].strip("'>")


def _test_pipeline(cfg: Config) -> List[Dict[str, Any]]:
    return list(_dataset(cfg).get('pipeline') or cfg.get('test_pipeline') or [])


def _dataset(cfg: Config) -> Dict[str, Any]:
    loaders = ('test_dataloader', 'val_dataloader', 'train_dataloader')
    return next(filter(None, (_unwrapped_dataset(cfg, loader) for loader in loaders)), {})


def _unwrapped_dataset(cfg: Config, loader: str) -> Dict[str, Any]:
    """Return the config of a loader's dataset without its wrappers; {} without a dataset.

    The first of several concatenated datasets represents all of them, and the labeled one of a
    SemiSupervisedDataset.
    """
    dataset = (cfg.get(loader) or {}).get('dataset')
    while isinstance(dataset, dict):
        joined = dataset.get('datasets')
        inner = (
            joined[0]
            if isinstance(joined, (list, tuple)) and joined
            else dataset.get('dataset', dataset.get('labeled'))
        )
        if not isinstance(inner, dict):
            return dataset
        dataset = inner
    return {}


def _dataset_meta(cfg: Config) -> Dict[str, Any]:
    dataset = _dataset(cfg)
    kind = dataset.get('type')
    if isinstance(kind, str):
        with DATASETS.switch_scope_and_registry(cfg.get('default_scope', 'mmseg')) as registry:
            kind = registry.get(kind)
    return {**(getattr(kind, 'METAINFO', None) or {}), **(dataset.get('metainfo') or {})}
