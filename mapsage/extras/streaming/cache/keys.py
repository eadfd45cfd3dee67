"""Short hashes of everything on which cached features depend: weights, settings and samples.

A cache is used only if its keys equal the keys of the run. A setting that is missing in the keys
would let a run train on wrong features without notice, so settings are hashed as a whole and
exceptions are listed.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import nn

from mapsage.accelerator import derived_seed
from mapsage.geo import VECTOR_SUFFIXES, Raster

# Settings of the location of a dataset. sample_hashes hashes its content instead.
_LOCATION_SETTINGS = ('data_root', 'data_prefix', 'ann_file', 'backend_args')
# Settings of GeoTiffDataset that decide which windows exist, and their labels.
_WINDOW_SETTINGS = (
    'scenes',
    'stride',
    'split',
    'windows',
    'aoi',
    'labels',
    'class_field',
    'default_class',
    'layer',
    'outside',
    'label_nodata',
)
# Packages whose transforms do not depend on labels, except with cat_max_ratio.
_LABEL_FREE_PACKAGES = ('mmcv', 'mmengine', 'mmseg', 'mapsage')
# A change that preserves a raster's size is searched for in 16 pieces of 4096 bytes.
_PIECES, _PIECE = 16, 4096
# First of the four numbers of a view's seed. The seeds that a run draws have three numbers.
_VIEW = int.from_bytes(b'view', 'big')

Seed = Tuple[int, ...]


@dataclass(frozen=True)
class CacheKeys:
    """Hashes of everything that decides the features of a dataset's samples.

    Attributes:
        weights: Hash of the encoder's weights.
        transforms: Hash of :attr:`settings`.
        samples: Hash of each sample: by index in a run, by slot in the index of a cache.
        settings: All settings between the image file and the features, as values of JSON.
    """

    weights: str
    transforms: str
    samples: Tuple[str, ...]
    settings: Any = field(compare=False)

    def differences(self, run: CacheKeys) -> List[str]:
        """Return a line for each key of a cache that differs from a run's keys, except the samples.

        Args:
            run: Keys of the run; ``self`` are the keys of the cache ("there" in the lines).
        """
        lines = []
        if self.weights != run.weights:
            lines.append(f'weights {self.weights} there, {run.weights} here')
        if self.transforms != run.transforms:
            changes = ''.join(
                f' ({change})' for change in _changes(self.settings, run.settings, 'config')
            )
            lines.append(f'transforms {self.transforms} there, {run.transforms} here{changes}')
        return lines


def keys_of_run(
    cfg: Mapping[str, Any], samples: Sequence[str], encoder: nn.Module, dtype: Optional[torch.dtype]
) -> CacheKeys:
    """Return the keys of the features that a run of a config would compute.

    Args:
        cfg: Complete config.
        samples: Hashes of the samples of ``train_dataloader.dataset``, of :func:`sample_hashes`.
        encoder: Module ``model.backbone``, with its weights.
        dtype: Dtype in which autocast computes; None without autocast.

    Raises:
        ValueError: If a setting cannot be written down.
    """
    model = cfg['model']
    layout: Dict[str, Any] = {}
    if (cfg.get('env_cfg') or {}).get('channels_last'):
        layout['channels_last'] = True
    # Caches of earlier versions have days in 16 bits, which cannot hold them.
    if dtype is not None and getattr(encoder, 'returns_facts', False):
        layout['facts'] = 'float32'
    settings = canonical(
        dict(
            layout,
            dataset=_without(cfg['train_dataloader']['dataset'], _LOCATION_SETTINGS),
            data_preprocessor=model.get('data_preprocessor') or cfg.get('data_preprocessor'),
            backbone=_without(model['backbone'], ('init_cfg',)),
            precision=None if dtype is None else str(dtype),
        )
    )
    return CacheKeys(weights_hash(encoder), hash_of(settings), tuple(samples), settings)


def weights_hash(encoder: nn.Module) -> str:
    """Return a hash of the names, shapes, dtypes and bytes of an encoder's state dict."""
    digest = hashlib.sha256()
    for name, tensor in sorted(encoder.state_dict().items()):
        value = tensor.detach().cpu().contiguous()
        digest.update(f'{name} {tuple(value.shape)} {value.dtype};'.encode())
        # NumPy has no bfloat16.
        if value.dtype == torch.bfloat16:
            value = value.view(torch.int16)
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()[:16]


def sample_hashes(dataset: Any, sizes: bool = True) -> List[str]:
    """Return a hash of each sample that a dataset lists.

    It does not depend on the position of the sample in the list, so that a cache keeps its features
    when samples are added, removed or sorted in another way; equal samples have one hash. Paths are
    relative to ``data_root``, so that moving a dataset does not change its hashes.

    A window of a scene is identified by its position, its bands and the files of its scene. Its
    labels count only if the pipeline may choose part of an image by them.

    Args:
        dataset: Map-style dataset with MMEngine's ``get_data_info``.
        sizes: Whether the size of each file is part of the hash, because editing a file nearly
            always changes its size. Reading sizes takes time on shared storage. For files of
            scenes, which often keep their size, some of their bytes are included as well.

    Raises:
        ValueError: If the dataset has no ``get_data_info``.
    """
    if not hasattr(dataset, 'get_data_info'):
        raise ValueError(
            f'{type(dataset).__name__} has no get_data_info(index), which '
            f'identifies its samples. Features of MMEngine datasets can be cached.'
        )
    roots = sorted({os.path.abspath(root) for root in _roots(dataset)}, key=len, reverse=True)
    known: Dict[str, Any] = {}
    hashes = []
    with_labels = any(_sees_labels(inner.__dict__.get('pipeline')) for inner in _datasets(dataset))
    for index in range(len(dataset)):
        info = dict(dataset.get_data_info(index))
        # MMEngine's position of the sample in the list.
        info.pop('sample_idx', None)
        if {'scene', 'bands', 'window'} <= info.keys():
            # A sample of GeoTiffDataset.
            info = _window(info, with_labels, roots, known if sizes else None)
        for key, value in info.items():
            if key.endswith('path') and isinstance(value, str):
                info[key] = [_relative(value, roots), _size(value, known) if sizes else 0]
        hashes.append(hash_of(canonical(info)))
    return hashes


def hash_of(value: object) -> str:
    """Return a hash of a value that :func:`canonical` returned."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def canonical(value: Any) -> Any:
    """Return a setting as values of JSON, which are equal in every process for equal settings.

    Raises:
        ValueError: If an object in it has only its address to identify it.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): canonical(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [canonical(element) for element in value]
    # Arrays, tensors and NumPy's numbers.
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        return canonical(value.tolist())
    # Classes and functions.
    if hasattr(value, '__qualname__'):
        return f'{value.__module__}.{value.__qualname__}'
    text = repr(value)
    if ' at 0x' in text:
        raise ValueError(
            f'the setting {text} looks different in every run, so it cannot identify '
            f'a cache. Write it as a dict with type=..., or as numbers.'
        )
    return text


@dataclass(frozen=True)
class ViewSeeds:
    """The seeds by which the views of a cache are loaded: ``views`` seeds for each sample.

    ``KeyedDataset.reseed`` calls it in the loader's workers.

    Attributes:
        seed: Seed of the cache, 0 or more.
        views: Number of views per sample.
        slots: Slot of each sample in the cache, by its index in the dataset, -1 where it has none;
            the index itself when None.
    """

    seed: int
    views: int
    slots: Optional[Tuple[int, ...]] = None

    def slot(self, index: int) -> int:
        """Return the slot of a sample, which stays when other samples come and go."""
        return index if self.slots is None else self.slots[index]

    def item(self, index: int, seed: Seed) -> int:
        """Return the number of the item that a sample was loaded as.

        Raises:
            ValueError: If the seed does not belong to a view of this cache.
        """
        return self.slot(index) * self.views + self.view(index, seed)

    def __call__(self, index: int, seed: Seed) -> Seed:
        """Return the seed of the view that stands for a sample of a run.

        Args:
            index: Number of the sample.
            seed: Seed that the run drew for the sample; it chooses the view.

        Raises:
            ValueError: If there is more than one view, and ``seed`` is empty.
        """
        if len(seed) == 4 and seed[0] == _VIEW:
            # The sample is loaded again, with the seed of a view.
            return seed
        if self.views > 1 and not seed:
            raise ValueError(
                f'sample {index} came without a seed to choose one of {self.views} '
                f'views by: name a sampler in train_dataloader, no batch_sampler.'
            )
        return self.of(index, derived_seed(*seed) % self.views if self.views > 1 else 0)

    def of(self, index: int, view: int) -> Seed:
        """Return the seed by which view ``view`` of sample ``index`` is loaded."""
        return (_VIEW, self.seed, self.slot(index), view)

    def view(self, index: int, seed: Seed) -> int:
        """Return the number of the view that a sample was loaded as.

        Raises:
            ValueError: If the seed does not belong to a view of this cache.
        """
        if (
            len(seed) != 4
            or seed[:3] != (_VIEW, self.seed, self.slot(index))
            or not 0 <= seed[3] < self.views
        ):
            raise ValueError(
                f'sample {index} was loaded by the seed {seed}, which is none of its '
                f'{self.views} cached view(s): KeyedDataset.reseed must be seed_of of '
                f'the source.'
            )
        return seed[3]


def _without(config: object, names: Tuple[str, ...]) -> object:
    """Return a config without some settings, at any depth."""
    if isinstance(config, Mapping):
        gone = names + (_WINDOW_SETTINGS if {'scenes', 'window'} <= config.keys() else ())
        return {key: _without(value, names) for key, value in config.items() if key not in gone}
    if isinstance(config, (list, tuple)):
        return [_without(element, names) for element in config]
    return config


def _window(
    info: Mapping[str, Any], with_labels: bool, roots: List[str], known: Optional[Dict[str, Any]]
) -> Dict[str, Any]:
    """Return the settings on which the image of a window depends.

    If ``known`` is None, files count by their names, otherwise also by their contents.
    """
    # A place has many files, images of sensors and dates.
    paths = info['stack'].source_paths() if 'stack' in info else [info['scene']]
    files = [_files(path, roots, known) for path in paths]
    facts = dict(
        scene=files if 'stack' in info else files[0], bands=info['bands'], window=info['window']
    )
    labels = info.get('labels')
    if with_labels and labels is not None:
        facts['labels'] = [_files(labels.path, roots, known), labels.settings]
    return facts


def _files(path: str, roots: List[str], known: Optional[Dict[str, Any]]) -> List[Any]:
    """Return the names and contents of the files that a raster or vector file consists of."""
    if known is None:
        return [_relative(path, roots)]
    if path not in known:
        raster = None if path.lower().endswith(VECTOR_SUFFIXES) else Raster(path)
        files = [path] if raster is None else raster.files()
        known[path] = [[_relative(file, roots), *_content(file)] for file in sorted(files)]
        if raster is not None:
            # Not by the .aux.xml file, which also changes for other reasons.
            known[path].append(raster.validity.facts())
    return known[path]


def _content(path: str) -> List[Any]:
    """Return the size of a file and a hash of pieces of it, -1 if it is not a local file."""
    if not os.path.isfile(path):
        return [-1]
    size, digest = os.path.getsize(path), hashlib.sha256()
    with open(path, 'rb') as file:
        for piece in range(_PIECES):
            file.seek(max(0, size - _PIECE) * piece // (_PIECES - 1))
            digest.update(file.read(_PIECE))
    return [size, digest.hexdigest()[:16]]


def _sees_labels(transform: object) -> bool:
    """Return whether a transform, or one inside of it, may choose a part by its labels."""
    if transform is None or isinstance(transform, (list, tuple)):
        return any(map(_sees_labels, transform or ()))
    return (
        getattr(transform, 'cat_max_ratio', 1) < 1
        or type(transform).__module__.partition('.')[0] not in _LABEL_FREE_PACKAGES
        or _sees_labels(getattr(transform, 'transforms', None))
    )


def _roots(dataset: Any) -> Iterator[str]:
    """Yield ``data_root`` of a dataset and of the datasets that it wraps."""
    for inner in _datasets(dataset):
        if inner.__dict__.get('data_root'):
            yield inner.data_root


def _datasets(dataset: Any) -> Iterator[Any]:
    """Yield a dataset and the datasets that it wraps."""
    yield dataset
    wrapped = dataset.__dict__.get('dataset')
    for inner in [wrapped] * (wrapped is not None) + list(dataset.__dict__.get('datasets') or ()):
        yield from _datasets(inner)


def _relative(path: str, roots: List[str]) -> str:
    absolute = path if '://' in path else os.path.abspath(path)
    for root in roots:
        if absolute.startswith(root + os.sep):
            return os.path.relpath(absolute, root)
    return path


def _size(path: str, known: Dict[str, int]) -> int:
    """Return the size of a file in bytes, -1 if the file is not a local one."""
    if path not in known:
        known[path] = os.path.getsize(path) if os.path.isfile(path) else -1
    return known[path]


def _changes(cached: object, current: object, key_path: str) -> Iterator[str]:
    """Yield the first setting that differs between a cache ("there") and a run ("here")."""
    if isinstance(cached, Mapping) and isinstance(current, Mapping):
        names = sorted(
            name for name in {*cached, *current} if cached.get(name) != current.get(name)
        )
        if names:
            name = names[0]
            yield from _changes(cached.get(name), current.get(name), f'{key_path}.{name}')
    elif isinstance(cached, list) and isinstance(current, list) and len(cached) == len(current):
        for index, (old, new) in enumerate(zip(cached, current)):
            if old != new:
                yield from _changes(old, new, f'{key_path}[{index}]')
                return
    else:
        yield f'{key_path}: {_short(cached)} there, {_short(current)} here'


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f'{text[:200]}...'
