"""The config of a training on labels and pseudo-labels together."""
from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

from mmengine.config import Config

from mapsage.atomic_write import atomic_write
from mapsage.inference.errors import PredictError
from mapsage.inference.model import Bands

from .pseudo_masks import MapPair

# Keys of the metainfo of a dataset that say how its files are read, not what its classes are.
_IGNORED = ('label_map', 'reduce_zero_label')


def join(cfg: Config, pairs: Sequence[MapPair], folder: Path, metainfo: Dict[str, Any],
         window: int, bands: Bands, times: Callable[[List[Any], List[Any]], int],
         work_dir: str) -> Config:
    """Return a config whose training data is that of ``cfg`` and the images with their masks.

    The new datasets stand beside the innermost labeled one, inside of all that wraps it but a
    choice of samples (``NamedSamples``). What the
    config says of the run (``work_dir``, ``resume``) is set for a new one.

    Args:
        cfg: Config of the training that the masks come from.
        pairs: Images with masks.
        folder: Absolute path of the folder that holds ``masks``; lists of files are written there.
        metainfo: ``metainfo`` of the labeled dataset.
        window: Side in pixels of windows of scenes, where ``cfg`` does not say it.
        bands: Bands that the model takes.
        times: Function of the labeled and the new datasets that stand beside each other that
            returns how often the labeled ones are repeated.
        work_dir: Where the training writes.

    Raises:
        PredictError: If the config has no training dataset of this form.
    """
    joined = copy.deepcopy(cfg)
    holder, key = _find(joined)
    labeled = holder[key]
    first = labeled
    while isinstance(first, (list, tuple)) or 'pipeline' not in first:
        inner = first[0] if isinstance(first, (list, tuple)) else first.get(
            'dataset', first.get('datasets'))
        if not inner or not isinstance(inner, (dict, list, tuple)):
            break
        first = inner
    added = _pictures([pair for pair in pairs if pair.is_picture], folder, first, metainfo)
    scenes = [pair for pair in pairs if not pair.is_picture]
    if scenes:
        added.append(_scenes(scenes, folder, first, metainfo, window, bands))
    before = list(labeled) if isinstance(labeled, (list, tuple)) else [labeled]
    again = times(before, added)
    if again > 1:
        before = [dict(type='RepeatDataset', times=again, dataset=each) for each in before]
    if isinstance(labeled, (list, tuple)):
        holder[key] = [*before, *added]
        holder['ignore_keys'] = _ignored(holder.get('ignore_keys'), metainfo)
    else:
        holder[key] = dict(type='ConcatDataset', datasets=[*before, *added],
                           ignore_keys=_ignored(None, metainfo))
    joined.work_dir = work_dir
    if joined.get('resume'):
        joined.load_from = None
    joined.resume = False
    joined.pop('launcher', None)
    return joined


def write_config(cfg: Config, path: Path, head: str) -> None:
    """Write a config with a text on top that says what it is for."""
    atomic_write(path, f'"""{head}"""\n{cfg.pretty_text}'.encode())


def labeled_dataset(cfg: Config) -> Any:
    """Return the config of the innermost labeled dataset of the training, or the list of them.

    Raises:
        PredictError: If there is none.
    """
    holder, key = _find(cfg)
    return holder[key]


def without_unlabeled(cfg: Config) -> Config:
    """Return the config of a training on the labeled data alone of one by FixMatch.

    Any other config is returned as it is.
    """
    dataset = (cfg.get('train_dataloader') or {}).get('dataset')
    if not isinstance(dataset, dict) or _kind(dataset) != 'SemiSupervisedDataset':
        return cfg
    plain = copy.deepcopy(cfg)
    loader = plain.train_dataloader
    loader.dataset = loader.dataset['labeled']
    endless = (loader.get('sampler') or {}).get('infinite', True)
    loader.sampler = dict(type='InfiniteSampler' if endless else 'DefaultSampler', shuffle=True)
    plain.custom_hooks = [each for each in plain.get('custom_hooks') or []
                          if _kind(each) != 'FixMatchHook']
    return plain


def _find(cfg: Config) -> Tuple[Any, str]:
    """Return what holds the labeled dataset or a list of them, and its key there."""
    holder: Any = cfg.get('train_dataloader') or {}
    key = 'dataset'
    if not isinstance(holder, dict) or not isinstance(holder.get(key), dict):
        raise PredictError('the config has no train_dataloader with a dataset, which pseudo-labels '
                           'could be joined with. Give the config of a training.')
    while True:
        inner = holder[key]
        if isinstance(inner.get('datasets'), (list, tuple)) and inner['datasets']:
            return inner, 'datasets'
        if not isinstance(inner.get('dataset'), dict) or _kind(inner) == 'NamedSamples':
            return holder, key
        holder = inner


def _pictures(pairs: Sequence[MapPair], folder: Path, labeled: Dict[str, Any],
              metainfo: Dict[str, Any]) -> List[Dict[str, Any]]:
    """Return a dataset for each folder and suffix of images."""
    groups: Dict[Tuple[str, str], List[str]] = {}
    for pair in pairs:
        place, file = os.path.split(os.path.abspath(pair.path))
        stem, suffix = os.path.splitext(file)
        groups.setdefault((place, suffix), []).append(stem)
    found = []
    for number, ((place, suffix), names) in enumerate(sorted(groups.items())):
        list_file = folder / f'images_{number}.txt'
        atomic_write(list_file, ('\n'.join(names) + '\n').encode())
        found.append(dict(
            type='BaseSegDataset', ann_file=str(list_file),
            data_prefix=dict(img_path=place, seg_map_path=str(folder / 'masks')),
            img_suffix=suffix, seg_map_suffix='.png', metainfo=_classes(metainfo),
            pipeline=_pipeline(labeled, ['LoadImageFromFile', 'LoadAnnotations'])))
    return found


def _scenes(pairs: Sequence[MapPair], folder: Path, labeled: Dict[str, Any],
            metainfo: Dict[str, Any], window: int, bands: Bands) -> Dict[str, Any]:
    """Return a dataset of scenes, which are cut and split as the labeled ones are."""
    order = list(bands.chosen or range(1, bands.count + 1))
    kept: Dict[str, Any] = dict(
        window=window, bands=order[::-1] if bands.like_opencv else order)
    if 'scenes' in labeled:  # GeoTiffDataset, or a subclass of it
        kept.update({key: copy.deepcopy(labeled[key]) for key in (
            'window', 'stride', 'bands', 'split', 'windows') if labeled.get(key) is not None})
        if isinstance(kept.get('windows'), dict):
            # How many windows an epoch has follows from the area; shares of named classes would
            # be an error where a class has no mask.
            kept['windows'] = {name: value for name, value in dict(kept['windows']).items()
                               if name != 'per_epoch'
                               and not (name == 'balance' and isinstance(value, dict))}
    return dict(
        type='GeoTiffDataset', scenes=[os.path.abspath(pair.path) if os.path.exists(pair.path)
                                       else pair.path for pair in pairs],
        labels=str(folder / 'masks'), **kept, metainfo=_classes(metainfo),
        pipeline=_pipeline(labeled, ['LoadGeoTiffWindow', 'LoadGeoTiffLabels']))


def _pipeline(labeled: Dict[str, Any], loaders: Sequence[str]) -> List[Dict[str, Any]]:
    """Return the labeled dataset's steps; its loaders of another kind of file are replaced."""
    steps = [copy.deepcopy(step) for step in labeled.get('pipeline') or []]
    loading = [step for step in steps if _kind(step).startswith('Load')]
    others = [step for step in steps if not _kind(step).startswith('Load')]
    own = {_kind(step): step for step in loading}
    made = [own.get(name, dict(type=name)) for name in loaders]
    made[1].pop('reduce_zero_label', None)
    return [*made, *others]


def _classes(metainfo: Dict[str, Any]) -> Dict[str, Any]:
    return {key: copy.deepcopy(metainfo[key]) for key in ('classes', 'palette') if key in metainfo}


def _ignored(given: Any, metainfo: Dict[str, Any]) -> List[str]:
    before = [given] if isinstance(given, str) else list(given or [])
    return list(dict.fromkeys([*before, *_IGNORED, *(
        key for key in metainfo if key not in ('classes', 'palette'))]))


def _kind(config: Any) -> str:
    return str(config.get('type')).rsplit('.', 1)[-1].strip("'>")
