"""Config of a training on labels and pseudo-labels.

`join` copies the config of the model that predicted the masks and adds datasets of the masks to its
innermost labeled dataset, so that every wrapper around it (repeats, FixMatch) applies to both.
The command that calls it is `commands/pseudo_labels.py`; the masks come from `pseudo_masks.py`.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

from mmengine.config import Config

from mapsage.base.files import atomic_write
from mapsage.geo.places import PlaceInputs
from mapsage.maps.errors import PredictError
from mapsage.maps.model import Bands

from .pseudo_masks import MapPair

# These keys of a dataset's metainfo say how its label files are read, not what its classes are.
# They differ between the joined datasets, and ConcatDataset must not compare them.
_READING_KEYS = ('label_map', 'reduce_zero_label')


def join(
    cfg: Config,
    pairs: Sequence[MapPair],
    folder: Path,
    metainfo: Dict[str, Any],
    window: int,
    bands: Bands,
    times: Callable[[List[Any], List[Any]], int],
    work_dir: str,
    places: Optional[PlaceInputs] = None,
) -> Config:
    """Return ``cfg`` with the images and their masks added to its training data.

    The new datasets are concatenated with the innermost labeled dataset, inside all wrappers
    except ``NamedSamples``, which selects samples by name. ``work_dir`` and ``resume`` are set for
    a new run.

    Args:
        cfg: Config of the training that produced the model of the masks.
        pairs: Images with masks.
        folder: Absolute path of the folder that contains ``masks``; lists of files are written
            there.
        metainfo: ``metainfo`` of the labeled dataset.
        window: Side in pixels of the windows of scenes, if ``cfg`` does not give one.
        bands: Bands that the model takes.
        times: Function that takes the labeled and the new datasets and returns how often the
            labeled ones are repeated.
        work_dir: Work dir of the new training.
        places: Places of a model of scene stacks; None if the pairs are images and scenes.

    Raises:
        PredictError: If the config has no training dataset that datasets can be joined with.
    """
    joined = copy.deepcopy(cfg)
    holder, key = _find_labeled(joined)
    labeled = holder[key]
    template = _first_with_pipeline(labeled)
    added = _picture_datasets(
        [pair for pair in pairs if pair.is_picture], folder, template, metainfo
    )
    scenes = [pair for pair in pairs if not pair.is_picture]
    if places is not None:
        added.append(_place_dataset(scenes, folder, template, metainfo, window, places))
    elif scenes:
        added.append(_scene_dataset(scenes, folder, template, metainfo, window, bands))
    labeled_datasets = list(labeled) if isinstance(labeled, (list, tuple)) else [labeled]
    repeats = times(labeled_datasets, added)
    if repeats > 1:
        labeled_datasets = [
            dict(type='RepeatDataset', times=repeats, dataset=dataset)
            for dataset in labeled_datasets
        ]
    if isinstance(labeled, (list, tuple)):
        holder[key] = [*labeled_datasets, *added]
        holder['ignore_keys'] = _ignore_keys(holder.get('ignore_keys'), metainfo)
    else:
        holder[key] = dict(
            type='ConcatDataset',
            datasets=[*labeled_datasets, *added],
            ignore_keys=_ignore_keys(None, metainfo),
        )
    joined.work_dir = work_dir
    if joined.get('resume'):
        joined.load_from = None
    joined.resume = False
    joined.pop('launcher', None)
    return joined


def write_config(cfg: Config, path: Path, head: str) -> None:
    """Write a config with ``head`` as its docstring."""
    atomic_write(path, f'"""{head}"""\n{cfg.pretty_text}'.encode())


def labeled_dataset(cfg: Config) -> Union[Dict[str, Any], List[Any]]:
    """Return the config of the innermost labeled training dataset, or the list of such configs.

    Raises:
        PredictError: If the config has no training dataset.
    """
    holder, key = _find_labeled(cfg)
    return holder[key]


def without_unlabeled(cfg: Config) -> Config:
    """Return a FixMatch config without its unlabeled data and its hook.

    Any other config is returned unchanged.
    """
    dataset = (cfg.get('train_dataloader') or {}).get('dataset')
    if not isinstance(dataset, dict) or _type_name(dataset) != 'SemiSupervisedDataset':
        return cfg
    plain = copy.deepcopy(cfg)
    loader = plain.train_dataloader
    loader.dataset = loader.dataset['labeled']
    endless = (loader.get('sampler') or {}).get('infinite', True)
    loader.sampler = dict(type='InfiniteSampler' if endless else 'DefaultSampler', shuffle=True)
    plain.custom_hooks = [
        hook for hook in plain.get('custom_hooks') or [] if _type_name(hook) != 'FixMatchHook'
    ]
    return plain


def _find_labeled(cfg: Config) -> Tuple[Dict[str, Any], str]:
    """Return the dict that contains the innermost labeled dataset or datasets, and the key."""
    holder: Any = cfg.get('train_dataloader') or {}
    key = 'dataset'
    if not isinstance(holder, dict) or not isinstance(holder.get(key), dict):
        raise PredictError(
            'the config has no train_dataloader with a dataset, which pseudo-labels '
            'could be joined with. Give the config of a training.'
        )
    while True:
        inner = holder[key]
        if isinstance(inner.get('datasets'), (list, tuple)) and inner['datasets']:
            return inner, 'datasets'
        if not isinstance(inner.get('dataset'), dict) or _type_name(inner) == 'NamedSamples':
            return holder, key
        holder = inner


def _first_with_pipeline(labeled: Any) -> Dict[str, Any]:
    """Return the first dataset config with a pipeline; the new datasets are built like it."""
    template = labeled
    while isinstance(template, (list, tuple)) or 'pipeline' not in template:
        inner = (
            template[0]
            if isinstance(template, (list, tuple))
            else template.get('dataset', template.get('datasets'))
        )
        if not inner or not isinstance(inner, (dict, list, tuple)):
            break
        template = inner
    return template


def _picture_datasets(
    pairs: Sequence[MapPair], folder: Path, template: Dict[str, Any], metainfo: Dict[str, Any]
) -> List[Dict[str, Any]]:
    """Return one dataset config per folder and suffix of images."""
    groups: Dict[Tuple[str, str], List[str]] = {}
    for pair in pairs:
        image_folder, file = os.path.split(os.path.abspath(pair.path))
        stem, suffix = os.path.splitext(file)
        groups.setdefault((image_folder, suffix), []).append(stem)
    datasets = []
    for number, ((image_folder, suffix), names) in enumerate(sorted(groups.items())):
        list_file = folder / f'images_{number}.txt'
        atomic_write(list_file, ('\n'.join(names) + '\n').encode())
        datasets.append(
            dict(
                type='BaseSegDataset',
                ann_file=str(list_file),
                data_prefix=dict(img_path=image_folder, seg_map_path=str(folder / 'masks')),
                img_suffix=suffix,
                seg_map_suffix='.png',
                metainfo=_classes(metainfo),
                pipeline=_pipeline(template, ['LoadImageFromFile', 'LoadAnnotations']),
            )
        )
    return datasets


def _scene_dataset(
    pairs: Sequence[MapPair],
    folder: Path,
    template: Dict[str, Any],
    metainfo: Dict[str, Any],
    window: int,
    bands: Bands,
) -> Dict[str, Any]:
    """Return a dataset config of scenes, cut into windows and split like the labeled scenes."""
    order = list(bands.chosen or range(1, bands.count + 1))
    settings: Dict[str, Any] = dict(
        window=window, bands=order[::-1] if bands.like_opencv else order
    )
    # Only GeoTiffDataset and its subclasses have `scenes`.
    if 'scenes' in template:
        settings.update(_window_settings(template, ('bands',)))
    return dict(
        type='GeoTiffDataset',
        scenes=[
            os.path.abspath(pair.path) if os.path.exists(pair.path) else pair.path for pair in pairs
        ],
        labels=str(folder / 'masks'),
        **settings,
        metainfo=_classes(metainfo),
        pipeline=_pipeline(template, ['LoadGeoTiffWindow', 'LoadGeoTiffLabels']),
    )


def _place_dataset(
    pairs: Sequence[MapPair],
    folder: Path,
    template: Dict[str, Any],
    metainfo: Dict[str, Any],
    window: int,
    places: PlaceInputs,
) -> Dict[str, Any]:
    """Return a dataset config of places, whose files and masks a list names."""
    list_file = folder / 'places.csv'
    atomic_write(
        list_file,
        places.list_text({pair.path: str(pair.mask(folder / 'masks')) for pair in pairs}).encode(),
    )
    settings = dict(dict(window=window), **_window_settings(template, ('sensors', 'grid')))
    return dict(
        type='SceneStackDataset',
        places=str(list_file),
        **settings,
        metainfo=_classes(metainfo),
        pipeline=_pipeline(template, ['LoadSceneStack', 'LoadGeoTiffLabels']),
    )


def _window_settings(template: Dict[str, Any], names: Sequence[str]) -> Dict[str, Any]:
    """Return the settings of a dataset of scenes that datasets of masks share.

    Args:
        template: Config of the labeled dataset.
        names: Names of further settings.
    """
    settings = {
        key: copy.deepcopy(template[key])
        for key in ('window', 'stride', 'split', 'windows', *names)
        if template.get(key) is not None
    }
    if isinstance(settings.get('windows'), dict):
        # Without per_epoch, the area gives the number of windows in an epoch. Shares by class go
        # too: they are an error if a class has no mask.
        settings['windows'] = {
            name: value
            for name, value in dict(settings['windows']).items()
            if name != 'per_epoch' and not (name == 'balance' and isinstance(value, dict))
        }
    return settings


def _pipeline(template: Dict[str, Any], loaders: Sequence[str]) -> List[Dict[str, Any]]:
    """Return the template's pipeline with ``loaders`` as its loading transforms.

    A loader that the template has too keeps its arguments.
    """
    steps = [copy.deepcopy(step) for step in template.get('pipeline') or []]
    template_loaders = {
        _type_name(step): step for step in steps if _type_name(step).startswith('Load')
    }
    loading = [template_loaders.get(name, dict(type=name)) for name in loaders]
    # The masks hold class indices: their zero is a class.
    loading[1].pop('reduce_zero_label', None)
    return [*loading, *(step for step in steps if not _type_name(step).startswith('Load'))]


def _classes(metainfo: Dict[str, Any]) -> Dict[str, Any]:
    return {key: copy.deepcopy(metainfo[key]) for key in ('classes', 'palette') if key in metainfo}


def _ignore_keys(
    configured: Union[None, str, Sequence[str]], metainfo: Dict[str, Any]
) -> List[str]:
    """Return the ``ignore_keys`` of the ConcatDataset, without duplicates."""
    keys = [configured] if isinstance(configured, str) else list(configured or [])
    return list(
        dict.fromkeys(
            [*keys, *_READING_KEYS, *(key for key in metainfo if key not in ('classes', 'palette'))]
        )
    )


def _type_name(config: Dict[str, Any]) -> str:
    """Return the class name in ``type``, which may be a name, a dotted path or a class."""
    return str(config.get('type')).rsplit('.', 1)[-1].strip("'>")
