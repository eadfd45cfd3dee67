"""Tests with test-time augmentation: the config's own, or mirror images for any dataset."""
from __future__ import annotations

import os
from typing import Any, Dict, Iterator, List, Optional

from mmengine.config import Config
from mmengine.logging import print_log

from mapsage.engine.env_cfg import ConfigError

_IMAGE_FILE, _MASK_FILE = 'LoadImageFromFile', 'LoadAnnotations'


def use_tta(cfg: Config) -> None:
    """Test with the config's ``tta_pipeline`` and ``tta_model``, or with mirror images.

    Without a ``tta_pipeline`` each image is tested as it is, mirrored from left to right, and
    upside down. A ``tta_pipeline`` that loads image and mask files, as an inherited one does, gets
    the loading transforms of the test pipeline in their place where the dataset has no such files.
    Datasets inside of wrappers are changed, each by its own test pipeline.

    Raises:
        ConfigError: If a test pipeline does not begin with a transform that loads the image.
    """
    given = cfg.get('tta_pipeline')
    for dataset in _datasets(cfg.test_dataloader.dataset):
        own = list(dataset.get('pipeline') or ())
        if given is None:
            dataset['pipeline'] = _mirrored(own)
            _say('the config has no tta_pipeline: each image is tested as it is and mirrored in '
                 'both directions')
        else:
            dataset['pipeline'] = _with_loaders_of(own, given)
    model = dict(cfg.get('tta_model') or dict(type='SegTTAModel'))
    cfg.model = dict(model, module=cfg.model)


def _mirrored(own: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Return a test pipeline with mirror images, made behind the transform that loads the image."""
    first = next((at for at, step in enumerate(own) if _name(step).startswith('Load')), None)
    if first is None:
        raise ConfigError(
            f'--tta: the test pipeline {[_name(step) for step in own]} has no transform Load..., '
            f'behind which images would be mirrored. Set tta_pipeline in the config.')
    # The image that is not mirrored comes first: its labels are those that count.
    mirrors = [dict(type='RandomFlip', prob=0.),
               *(dict(type='RandomFlip', prob=1., direction=direction)
                 for direction in ('horizontal', 'vertical'))]
    return [*own[:first + 1], dict(type='TestTimeAug', transforms=[
        mirrors, *([step] for step in own[first + 1:])])]


def _with_loaders_of(own: List[Dict[str, Any]], given: List[Any]) -> List[Any]:
    """Return ``given`` with the loading transforms of a test pipeline instead of those of files."""
    loaders = [step for step in own if _name(step).startswith('Load')]
    names = [_name(step) for step in loaders]
    swaps: Dict[str, List[Any]] = {}
    if loaders and _IMAGE_FILE not in names:
        swaps = {_IMAGE_FILE: loaders[:1], _MASK_FILE: loaders[1:]}
    elif loaders[1:] and _MASK_FILE not in names:
        swaps = {_MASK_FILE: loaders[1:]}
    changed = _swapped(given, swaps)
    if changed != given:
        _say(f'tta_pipeline loads files, and the test pipeline does not: its {", ".join(names)} '
             f'are used')
    return changed


def _swapped(steps: List[Any], swaps: Dict[str, List[Any]]) -> List[Any]:
    """Return the steps of a pipeline, or the variants of TestTimeAug, with some exchanged."""
    changed: List[Any] = []
    for step in steps:
        if isinstance(step, (list, tuple)):  # variants; without any, there is nothing to vary
            variants = _swapped(list(step), swaps)
            changed += [variants] * bool(variants)
        elif 'transforms' in step:
            changed.append(dict(step, transforms=_swapped(step['transforms'], swaps)))
        else:
            changed += swaps.get(_name(step), [step])
    return changed


def _datasets(dataset: Any) -> Iterator[Any]:
    """Yield the datasets of a config that are inside of wrappers."""
    inside: List[Optional[Any]] = [dataset.get('dataset'), *(dataset.get('datasets') or ())]
    if not any(inside):
        yield dataset
    for each in filter(None, inside):
        yield from _datasets(each)


def _name(step: Any) -> str:
    kind = step.get('type')
    return str(getattr(kind, '__name__', kind)).rpartition('.')[2]


def _say(line: str) -> None:
    if os.environ.get('RANK', '0') == '0':
        print_log(f'--tta: {line}')
