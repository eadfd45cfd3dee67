"""The weights, classes and bands of a model, read from its config and its checkpoint."""
from __future__ import annotations

import hashlib
import os
import pickle
from typing import Any, Dict, List, Optional, Tuple, cast

from mmengine.config import Config
from mmengine.registry import DATASETS
from mmengine.runner import CheckpointLoader
from torch import nn

from mapsage.drawing.tiles import class_palette
from mapsage.models.checkpoint_fit import CheckpointFitError, check_whole, plain_weights
from mapsage.models.frozen_weights import FrozenWeightsError, restore_left_out

from .blending import NO_DATA
from .description import Bands, Classes
from .errors import PredictError

DEFAULT_WINDOW = 512


def load_weights(model: nn.Module, path: str) -> Dict[str, Any]:
    """Load a checkpoint into ``model`` and return the checkpoint's ``meta``.

    Args:
        model: Model that gets the weights.
        path: Path of the checkpoint, a local file.

    Raises:
        PredictError: If the checkpoint cannot be read, or if its weights do not fit the model.
    """
    if '://' in path:
        raise PredictError(f'checkpoint {path!r} is not a local file. Download it first.')
    try:
        checkpoint = CheckpointLoader.load_checkpoint(path, map_location='cpu')
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise PredictError(f'checkpoint {path} cannot be read: {error}') from error
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
    return meta


def find_classes(cfg: Config, meta: Dict[str, Any], model: nn.Module) -> Classes:
    """Return the classes that the checkpoint was trained with, or else those of the config's data.

    Args:
        cfg: Config of the run.
        meta: ``meta`` of the checkpoint.
        model: Model with an attribute ``num_classes``.

    Raises:
        PredictError: If there are no classes, or not as many as the model has.
    """
    count = int(cast(Any, model).num_classes)
    if count == 1:
        raise PredictError('the decode head has num_classes=1, but a map also needs a class for '
                           'everything else. Set num_classes=2 (out_channels=1 may stay) and name '
                           'both classes.')
    for where, found in (("the checkpoint's dataset_meta", meta.get('dataset_meta')),
                         ("the config's dataset", _dataset_meta(cfg))):
        names = (found or {}).get('classes')
        if not names:
            continue
        if len(names) != count:
            raise PredictError(f'the model has {count} classes, but {where} names {len(names)}: '
                               f'{", ".join(map(str, names[:10]))}. Correct num_classes of the '
                               f'decode head or the metainfo of the dataset.')
        if count >= NO_DATA:
            raise PredictError(f'{count} classes do not fit a map of 8 bits: at most {NO_DATA}.')
        return Classes(tuple(map(str, names)), class_palette(count, (found or {}).get('palette')))
    raise PredictError(
        "neither the checkpoint nor the config's test_dataloader names classes. Set "
        "metainfo=dict(classes=[...], palette=[...]) in the config's test_dataloader.dataset.")


def find_bands(cfg: Config, model: nn.Module) -> Bands:
    """Return the number of bands that the model takes, and the order of its test pipeline.

    Raises:
        PredictError: If the order of bands depends on the file (``color_type='unchanged'``).
    """
    mean = getattr(model.data_preprocessor, 'mean', None)
    count = 0 if mean is None else int(mean.numel())
    if count < 2:  # a single mean applies to any number of bands
        first = next((each for each in model.modules() if isinstance(each, nn.Conv2d)), None)
        count = 3 if first is None else first.in_channels * first.groups
    steps = _test_pipeline(cfg)
    names = [str(step.get('type')).rsplit('.', 1)[-1].strip("'>") for step in steps]
    loader = steps[0] if steps else {}
    color_type = loader.get('color_type', 'color')
    by_opencv = (not names or names[0] == 'LoadImageFromFile') \
        and loader.get('imdecode_backend') != 'tifffile'  # tifffile keeps the order of the file
    if by_opencv and count > 1 and color_type not in ('color', 'color_ignore_orientation'):
        raise PredictError(f"the test pipeline has LoadImageFromFile(color_type={color_type!r}) "
                           f'and the model takes {count} bands: which band comes first depends on '
                           "the file. Use color_type='color', or train on scenes with "
                           'GeoTiffDataset.')
    like_opencv = count == 3 and by_opencv
    ignored = tuple(name for name in names[1:]
                    if not name.startswith(('Load', 'Pack', 'Collect', 'Resize')))
    resize = next((dict(step) for step, name in zip(steps, names) if name == 'Resize'), None)
    chosen = (_dataset(cfg) or {}).get('bands')  # a GeoTiffDataset has this key
    return Bands(count, like_opencv, tuple(chosen) if chosen else None, ignored,
                 loader.get('imdecode_backend'), color_type, resize)


def default_window(cfg: Config) -> Tuple[Tuple[int, int], str]:
    """Return the height and width that the model was trained on, and what of the config says so.

    These are, in this order, the crop size of the model's sliding test, the windows that training
    reads from scenes (or what a ``RandomCrop`` leaves of them), ``crop_size`` and the size of the
    preprocessor; :data:`DEFAULT_WINDOW` if the config has none of them.
    """
    model = cfg.model
    preprocessor = model.get('data_preprocessor') or cfg.get('data_preprocessor') or {}
    for size, what in (
            ((model.get('test_cfg') or {}).get('crop_size'), "crop_size of the model's test_cfg"),
            _dataset_window(cfg), (cfg.get('crop_size'), 'crop_size'),
            (preprocessor.get('size'), 'size of the data_preprocessor')):
        if size:
            height, width = (size, size) if isinstance(size, int) else size
            return (int(height), int(width)), f'{what} in the config'
    return (DEFAULT_WINDOW, DEFAULT_WINDOW), 'the default: the config names no size'


def _dataset_window(cfg: Config) -> Tuple[Any, str]:
    """Return the side of the windows that a dataset of scenes gives to the model, or None."""
    for loader in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        dataset = _dataset_of(cfg, loader) or {}
        if not isinstance(dataset.get('window'), int):
            continue
        crops = [step.get('crop_size') for step in dataset.get('pipeline') or []
                 if str(step.get('type')).rsplit('.', 1)[-1].strip("'>") == 'RandomCrop']
        return (crops[-1], f"RandomCrop of the {loader}'s dataset") if crops and crops[-1] else (
            dataset['window'], f"window of the {loader}'s dataset")
    return None, ''


def file_hash(path: str) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(os.path.expanduser(path), 'rb') as file:
        for block in iter(lambda: file.read(1 << 20), b''):
            digest.update(block)
    return digest.hexdigest()


def settings_of(cfg: Config) -> str:
    """Return, as text, all parts of the config that decide what the model predicts for a window."""
    parts = dict(model=cfg.model, data_preprocessor=cfg.get('data_preprocessor'),
                 loader=_test_pipeline(cfg)[:1])
    if (cfg.get('env_cfg') or {}).get('channels_last'):  # the last bits of the scores
        parts['channels_last'] = True
    return repr(Config(parts).to_dict())


def _test_pipeline(cfg: Config) -> List[Dict[str, Any]]:
    dataset = _dataset(cfg)
    return list((dataset or {}).get('pipeline') or cfg.get('test_pipeline') or [])


def _dataset(cfg: Config) -> Optional[Dict[str, Any]]:
    for loader in ('test_dataloader', 'val_dataloader', 'train_dataloader'):
        dataset = _dataset_of(cfg, loader)
        if dataset is not None:
            return dataset
    return None


def _dataset_of(cfg: Config, loader: str) -> Optional[Dict[str, Any]]:
    """Return the dataset of a loader of the config, without what wraps it; None if there is none.

    Of several that are joined, the first stands for all.
    """
    dataset = (cfg.get(loader) or {}).get('dataset')
    while isinstance(dataset, dict):
        joined = dataset.get('datasets')
        inner = joined[0] if isinstance(joined, (list, tuple)) and joined else dataset.get(
            'dataset', dataset.get('labeled'))  # that of a SemiSupervisedDataset
        if not isinstance(inner, dict):
            return dataset
        dataset = inner
    return None


def _dataset_meta(cfg: Config) -> Dict[str, Any]:
    dataset = _dataset(cfg)
    if dataset is None:
        return {}
    kind = dataset.get('type')
    if isinstance(kind, str):
        with DATASETS.switch_scope_and_registry(cfg.get('default_scope', 'mmseg')) as registry:
            kind = registry.get(kind)
    return {**(getattr(kind, 'METAINFO', None) or {}), **(dataset.get('metainfo') or {})}
