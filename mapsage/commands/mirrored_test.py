"""tools/test.py --tta: test-time augmentation by the config, or by mirror images for any dataset.

MMSegmentation's `tta_pipeline` is usually inherited from a base config and loads image files. Where
the dataset loads its images in another way (windows of scenes), the loading transforms of its test
pipeline replace those in the `tta_pipeline`.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Iterator, List, Optional

from mmengine.config import Config
from mmengine.logging import print_log

from mapsage.engine.env_cfg import ConfigError

_IMAGE_FILE, _MASK_FILE = 'LoadImageFromFile', 'LoadAnnotations'


def use_tta(cfg: Config) -> None:
    """Change a config to test with its ``tta_pipeline`` and ``tta_model``, or with mirror images.

    Without a ``tta_pipeline``, every image is tested unchanged, mirrored from left to right, and
    upside down. Wrapped datasets are changed inside their wrappers, each with its own test
    pipeline.

    Raises:
        ConfigError: If a test pipeline does not begin with a transform that loads the image.
    """
    tta_pipeline = cfg.get('tta_pipeline')
    for dataset in _unwrapped_datasets(cfg.test_dataloader.dataset):
        test_pipeline = list(dataset.get('pipeline') or ())
        if tta_pipeline is None:
            dataset['pipeline'] = _mirrored(test_pipeline)
            _log(
                'the config has no tta_pipeline: each image is tested as it is and mirrored in '
                'both directions'
            )
        else:
            dataset['pipeline'] = _with_loaders_of(test_pipeline, tta_pipeline)
    model = dict(cfg.get('tta_model') or dict(type='SegTTAModel'))
    cfg.model = dict(model, module=cfg.model)


def _mirrored(test_pipeline: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Return a test pipeline with mirror images, inserted after the transform of the image."""
    names = [_type_name(step) for step in test_pipeline]
    first = next((number for number, name in enumerate(names) if name.startswith('Load')), None)
    if first is None:
        raise ConfigError(
            f'--tta: the test pipeline {names} has no transform Load..., '
            f'behind which images would be mirrored. Set tta_pipeline in the config.'
        )
    # The unmirrored image comes first, because its labels are compared with the prediction.
    mirrors = [
        dict(type='RandomFlip', prob=0.0),
        *(
            dict(type='RandomFlip', prob=1.0, direction=direction)
            for direction in ('horizontal', 'vertical')
        ),
    ]
    return [
        *test_pipeline[: first + 1],
        dict(
            type='TestTimeAug',
            transforms=[mirrors, *([step] for step in test_pipeline[first + 1 :])],
        ),
    ]


def _with_loaders_of(test_pipeline: List[Dict[str, Any]], tta_pipeline: List[Any]) -> List[Any]:
    """Return a TTA pipeline that loads images and masks like the test pipeline."""
    loaders = [step for step in test_pipeline if _type_name(step).startswith('Load')]
    names = [_type_name(step) for step in loaders]
    swaps: Dict[str, List[Any]] = {}
    if loaders and _IMAGE_FILE not in names:
        swaps = {_IMAGE_FILE: loaders[:1], _MASK_FILE: loaders[1:]}
    elif loaders[1:] and _MASK_FILE not in names:
        swaps = {_MASK_FILE: loaders[1:]}
    changed = _swapped(tta_pipeline, swaps)
    if changed != tta_pipeline:
        _log(
            f'tta_pipeline loads files, and the test pipeline does not: its {", ".join(names)} '
            f'are used'
        )
    return changed


def _swapped(steps: List[Any], swaps: Dict[str, List[Any]]) -> List[Any]:
    """Return the steps of a pipeline with some types replaced, also inside TestTimeAug.

    Args:
        steps: Steps, or lists of variants as in TestTimeAug.
        swaps: Type of a step -> the steps that replace it.
    """
    changed: List[Any] = []
    for step in steps:
        # Variants of TestTimeAug; a list that becomes empty is dropped.
        if isinstance(step, (list, tuple)):
            variants = _swapped(list(step), swaps)
            changed += [variants] * bool(variants)
        elif 'transforms' in step:
            changed.append(dict(step, transforms=_swapped(step['transforms'], swaps)))
        else:
            changed += swaps.get(_type_name(step), [step])
    return changed


def _unwrapped_datasets(dataset: Dict[str, Any]) -> Iterator[Dict[str, Any]]:
    """Yield the innermost dataset configs in the config of a dataset."""
    inner: List[Optional[Dict[str, Any]]] = [
        dataset.get('dataset'),
        *(dataset.get('datasets') or ()),
    ]
    if not any(inner):
        yield dataset
    for config in inner:
        if config:
            yield from _unwrapped_datasets(config)


def _type_name(step: Dict[str, Any]) -> str:
    kind = step.get('type')
    return str(getattr(kind, '__name__', kind)).rpartition('.')[2]


def _log(line: str) -> None:
    """Log a line on rank 0."""
    if os.environ.get('RANK', '0') == '0':
        print_log(f'--tta: {line}')
