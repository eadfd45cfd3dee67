"""Values of a config that no training could use, found before anything is built.

Each rule is a row: the setting, a test of its value, and what is expected. A run raises the mistakes
at its start, the doctor lists them. Only values that certainly fail, or that certainly ruin the
training, are mistakes: whatever a user's own class reads is left alone.
"""

from __future__ import annotations

import logging
import math
import os
import zipfile
from typing import Any, Callable, Iterator, List, Mapping, Optional, Sequence, Tuple

from mmengine.registry import DATASETS, TRANSFORMS
from mmseg.datasets import BaseSegDataset

from mapsage.engine.env_cfg import ConfigError

from .mistakes import check_settings, look_up

# More workers than this, and than eight for each core, start for minutes and fill the memory.
_MOST_WORKERS = 64
_LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')
_LEVELS = ('NOTSET', 'DEBUG', 'INFO', 'WARNING', 'WARN', 'ERROR', 'CRITICAL', 'FATAL')
# Packages whose transforms load labels only if their name begins with Load.
_PACKAGES = ('mmcv.', 'mmseg.', 'mapsage.')


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _counts(value: object) -> bool:
    return _is_whole(value, 1)


def _counts_steps(value: object) -> bool:
    # MMEngine's loops take 1e4 as well.
    return _counts(int(value) if isinstance(value, float) and value.is_integer() else value)


def _counts_or_never(value: object) -> bool:
    return _counts(value) or value == -1


def _is_size(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_counts, value))


def _is_rate(value: object) -> bool:
    # A tensor or a user's object is not judged.
    return not isinstance(value, (int, float, str, list, tuple, dict)) or (
        _is_number(value) and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]
    )


def _are_positive(value: object) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, (list, tuple))
        and all(_is_number(number) and number > 0 for number in value)
    )


def _are_numbers(value: object) -> bool:
    # Stacks have a list for each sensor, which their preprocessor checks.
    return isinstance(value, Mapping) or (
        isinstance(value, (list, tuple)) and all(map(_is_number, value))
    )


def _is_share(value: object) -> bool:
    return _is_number(value) and 0 <= value <= 1  # type: ignore[operator]


def _are_betas(value: object) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) >= 2
        and all(_is_share(beta) and beta < 1 for beta in value)
    )


_Rule = Tuple[str, Callable[[Any], bool], str]
_COUNT = 'a whole number of at least 1'
_RULES: Sequence[_Rule] = (
    ('train_cfg.max_iters', _counts_steps, f'{_COUNT}, the steps of the training'),
    ('train_cfg.max_epochs', _counts_steps, f'{_COUNT}, the epochs of the training'),
    (
        'train_cfg.val_interval',
        _counts_steps,
        f'{_COUNT}, the steps (or epochs) between two validations; to validate never, set '
        f'val_dataloader, val_cfg and val_evaluator to None',
    ),
    ('optim_wrapper.optimizer.lr', _is_rate, 'a number of 0 or more such as 1e-3'),
    ('optim_wrapper.optimizer.weight_decay', _is_rate, 'a number of 0 or more such as 0.01'),
    (
        'optim_wrapper.optimizer.momentum',
        _is_rate,
        'a number of 0 or more such as 0.9',
    ),
    ('optim_wrapper.optimizer.betas', _are_betas, 'numbers from 0 to below 1 such as (0.9, 0.999)'),
    (
        'optim_wrapper.clip_grad.max_norm',
        lambda value: _is_number(value) and value > 0,
        'a number above 0, the largest norm of the gradients',
    ),
    ('optim_wrapper.accumulative_counts', _counts, f'{_COUNT}, the batches of an optimizer step'),
    *(
        rule
        for loader in _LOADERS
        for rule in (
            (f'{loader}.batch_size', _counts, f'{_COUNT}, the images of a batch'),
            (
                f'{loader}.num_workers',
                lambda value: _is_whole(value, 0),
                'a whole number of 0 or more, the processes that load images',
            ),
        )
    ),
    ('default_hooks.logger.interval', _counts, f'{_COUNT}, the steps between two lines of the log'),
    (
        'default_hooks.checkpoint.interval',
        _counts_or_never,
        f'{_COUNT}, the steps (or epochs) between two checkpoints, or -1 for none',
    ),
    (
        'default_hooks.checkpoint.max_keep_ckpts',
        _counts_or_never,
        f'{_COUNT}, the checkpoints to keep, or -1 for all',
    ),
    (
        'randomness.seed',
        lambda value: _is_whole(value, 0) and value < 2**32,
        'a whole number from 0 to 4294967295, or None',
    ),
    ('model.data_preprocessor.size', _is_size, '(HEIGHT, WIDTH) in pixels such as (512, 512)'),
    ('model.data_preprocessor.mean', _are_numbers, 'a list of numbers, one for each band'),
    ('model.data_preprocessor.std', _are_positive, 'a list of numbers above 0, one for each band'),
    ('model.decode_head.channels', _counts, f'{_COUNT}, the channels before the last layer'),
    (
        'model.decode_head.dropout_ratio',
        # Configs of MMSegmentation write -1 for none.
        lambda value: _is_number(value) and value <= 1,
        'a number from 0 to 1',
    ),
    ('model.decode_head.num_classes', _counts, f'{_COUNT}, the number of classes'),
    (
        'log_level',
        lambda value: (
            isinstance(value, int) or (isinstance(value, str) and value.upper() in _LEVELS)
        ),
        'DEBUG, INFO, WARNING or ERROR',
    ),
)


def check_config(cfg: Mapping[str, Any], values: bool = False) -> None:
    """Check a config before anything is built.

    Args:
        cfg: Config of a run.
        values: Whether to check the values too, as tools/train.py does; a Runner checks the keys.

    Raises:
        ConfigError: With every wrong value, a line each; else with the first setting that is missing.
    """
    mistakes = list(value_mistakes(cfg)) if values else []
    if mistakes:
        raise ConfigError('\n'.join(mistakes))
    check_settings(cfg)


def value_mistakes(cfg: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each value that no training can use: value, expectation, next step."""
    for setting, accepts, expected in _RULES:
        value = look_up(cfg, setting)
        if value is not None and not accepts(value):
            yield f'{setting}={value!r}: expected {expected}.'
    yield from _model_mistakes(_section(cfg, 'model'))
    yield from _schedule_mistakes(cfg)
    yield from _path_mistakes(cfg)
    earlier: List[str] = []
    for loader in _LOADERS:
        for mistake in _loader_mistakes(cfg, loader):
            # The three loaders mostly share their classes and colors.
            text = mistake.partition(': ')[2]
            if text not in earlier or not text.startswith('metainfo'):
                yield mistake
            earlier.append(text)


def _section(cfg: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = cfg.get(key)
    return section if isinstance(section, Mapping) else {}


def _model_mistakes(model: Mapping[str, Any]) -> Iterator[str]:
    preprocessor = _section(model, 'data_preprocessor')
    mean, std = preprocessor.get('mean'), preprocessor.get('std')
    if isinstance(mean, (list, tuple)) and isinstance(std, (list, tuple)) and len(mean) != len(std):
        yield (
            f'model.data_preprocessor has {len(mean)} value(s) of mean and {len(std)} of std: '
            f'expected one of each for each band.'
        )
    # Segmentors of users may know other modes.
    if model.get('type') not in ('EncoderDecoder', 'CascadeEncoderDecoder'):
        return
    test = _section(model, 'test_cfg')
    mode = test.get('mode', 'whole')
    if mode not in ('whole', 'slide'):
        yield f"model.test_cfg.mode={mode!r}: expected 'whole' or 'slide'."
    elif mode == 'slide' and not all(_is_size(test.get(key)) for key in ('crop_size', 'stride')):
        yield (
            "model.test_cfg.mode='slide': expected crop_size=(HEIGHT, WIDTH) and stride=(DOWN, "
            'RIGHT) in pixels beside it, such as crop_size=(512, 512), stride=(384, 384).'
        )


def _schedule_mistakes(cfg: Mapping[str, Any]) -> Iterator[str]:
    schedulers = cfg.get('param_scheduler')
    schedulers = [schedulers] if isinstance(schedulers, Mapping) else schedulers
    for number, scheduler in enumerate(schedulers if isinstance(schedulers, (list, tuple)) else ()):
        if not isinstance(scheduler, Mapping):
            continue
        begin, end = scheduler.get('begin', 0), scheduler.get('end')
        factor = scheduler.get('start_factor', 1)
        if scheduler.get('type') == 'LinearLR' and not (_is_share(factor) and factor > 0):
            yield (
                f'param_scheduler[{number}] (LinearLR) has start_factor={factor!r}: expected a number '
                f'above 0 and at most 1, the factor of the first step.'
            )
        if _is_number(begin) and _is_number(end) and end <= begin:
            yield (
                f'param_scheduler[{number}] ({scheduler.get("type")}) has begin={begin} and '
                f'end={end}: expected an end after its begin. Train longer, let it begin earlier, or '
                f'remove it.'
            )


def _path_mistakes(cfg: Mapping[str, Any]) -> Iterator[str]:
    work_dir, weights = cfg.get('work_dir'), cfg.get('load_from')
    if isinstance(work_dir, str) and work_dir:
        obstacle = folder_obstacle(work_dir)
        if obstacle:
            yield (
                f'work_dir={work_dir!r}: {obstacle}. Expected a folder that can be written; choose '
                f'another with --work-dir.'
            )
    # A resumed run may have begun with weights that are gone.
    if isinstance(weights, str) and not cfg.get('resume') and '://' not in weights:
        obstacle = checkpoint_obstacle(weights)
        if obstacle:
            yield (
                f'load_from={weights!r} {obstacle}: expected the path or URL of a checkpoint. '
                f'Correct the path, or set load_from=None.'
            )


def checkpoint_obstacle(path: str) -> Optional[str]:
    """Return why a file's kind or first bytes rule out a checkpoint, or None."""
    path = os.path.expanduser(path)
    if not os.path.exists(path):
        return 'does not exist'
    if not os.path.isfile(path):
        return 'is not a file'
    with open(path, 'rb') as file:
        start = file.read(512)
    if start.startswith(b'PK'):
        return None if zipfile.is_zipfile(path) else 'is truncated'
    # PyTorch's older files are pickles; its oldest are tar archives. A safetensors file begins with
    # the length of its header.
    is_checkpoint = (
        start.startswith(b'\x80')
        or start[257:262] == b'ustar'
        or (path.endswith('.safetensors') and start[8:9] == b'{')
    )
    return None if is_checkpoint else f'begins with {start[:24]!r}' if start else 'is empty'


def folder_obstacle(folder: str) -> Optional[str]:
    """Return why no file can be written into a folder that may not exist yet, or None."""
    path = os.path.abspath(folder)
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        kind = 'a file' if os.path.isfile(path) else 'not a folder'
        return f'{path} is {kind}'
    return None if os.access(path, os.W_OK | os.X_OK) else f'{path} cannot be written by this user'


def _loader_mistakes(cfg: Mapping[str, Any], name: str) -> Iterator[str]:
    loader = _section(cfg, name)
    workers, cores = loader.get('num_workers'), _cores()
    most = max(_MOST_WORKERS, 8 * cores)
    if _is_whole(workers, most + 1):
        yield (
            f'{name}.num_workers={workers!r} on {cores} core(s): expected at most {most}. Set '
            f'{name}.num_workers={min(cores, 8)}.'
        )
    prefetch = loader.get('prefetch_factor')
    if prefetch is not None and not _counts(prefetch):
        yield f'{name}.prefetch_factor={prefetch!r}: expected {_COUNT}, batches for each worker.'
    seen: List[str] = []
    for dataset in datasets_in(loader.get('dataset')):
        # The pipeline of a wrapper, such as MultiImageMixDataset, may load and pack.
        whole = dataset is loader.get('dataset')
        for mistake in (*_metainfo_mistakes(dataset), *_pipeline_mistakes(dataset, name, whole)):
            if mistake not in seen:
                seen.append(mistake)
                yield f'{name}: {mistake}'


def _cores() -> int:
    """Return the number of processor cores that this process may use."""
    affinity = getattr(os, 'sched_getaffinity', None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def datasets_in(config: object) -> Iterator[Mapping[str, Any]]:
    """Yield the innermost dataset configs in a dataset's config or a list of them."""
    if isinstance(config, (list, tuple)):
        for item in config:
            yield from datasets_in(item)
    elif isinstance(config, Mapping):
        inner = [config[key] for key in ('dataset', 'datasets') if key in config]
        if inner:
            yield from datasets_in(inner)
        else:
            yield config


def _metainfo_mistakes(dataset: Mapping[str, Any]) -> Iterator[str]:
    metainfo = _section(dataset, 'metainfo')
    classes, palette = metainfo.get('classes'), metainfo.get('palette')
    if isinstance(classes, str) and not os.path.exists(classes):
        # MMEngine reads the classes from a file of this name.
        yield (
            f"metainfo.classes={classes!r}: expected a tuple of names such as ('ground', "
            f"'house'); one class needs a comma, ('house',)."
        )
        return
    if isinstance(classes, (list, tuple)):
        double = sorted({str(name) for name in classes if list(classes).count(name) > 1})
        if not classes or not all(isinstance(name, str) for name in classes):
            yield f'metainfo.classes={classes!r}: expected the names of the classes.'
        elif double:
            yield (
                f'metainfo.classes has {", ".join(map(repr, double))} more than once: expected a '
                f'different name for each class.'
            )
    if not isinstance(palette, (list, tuple)) or not isinstance(classes, (list, tuple)):
        return
    for index, color in enumerate(palette):
        if (
            not isinstance(color, (list, tuple))
            or len(color) != 3
            or not all(_is_whole(value, 0) and value <= 255 for value in color)
        ):
            yield (
                f'metainfo.palette[{index}]={color!r}: expected [RED, GREEN, BLUE], whole numbers '
                f'from 0 to 255.'
            )
    if palette and len(palette) != len(classes):
        yield (
            f'metainfo.palette has {len(palette)} color(s) for {len(classes)} classes '
            f'({", ".join(map(str, classes))}): expected one for each. Add the missing colors, or '
            f'leave palette out.'
        )


def _pipeline_mistakes(dataset: Mapping[str, Any], loader: str, whole: bool) -> Iterator[str]:
    pipeline = dataset.get('pipeline')
    if pipeline is not None and not isinstance(pipeline, (list, tuple)):
        yield f'pipeline={pipeline!r}: expected a list of transforms, [dict(type=...), ...].'
        return
    steps = [step for step in pipeline or () if isinstance(step, Mapping)]
    for step in steps:
        if step.get('type') == 'RandomCrop':
            size = step.get('crop_size')
            if not _counts(size) and not (isinstance(size, tuple) and _is_size(size)):
                yield f'RandomCrop.crop_size={size!r}: expected (HEIGHT, WIDTH) such as (512, 512).'
        if step.get('type') == 'RandomFlip':
            share = step.get('prob')
            if _is_number(share) and not 0 <= share <= 1:  # type: ignore[operator]
                yield f'RandomFlip.prob={share!r}: expected a number from 0 to 1.'
    if len(steps) != len(pipeline or ()) or not steps or not whole:
        return
    kinds = [_class_of(TRANSFORMS, step.get('type')) for step in steps]
    if not all(kind is not None and kind.__module__.startswith(_PACKAGES) for kind in kinds):
        # A user's transform may load labels too.
        return
    dataset_class = _class_of(DATASETS, dataset.get('type'))
    if (
        dataset_class is None
        or not issubclass(dataset_class, BaseSegDataset)
        # Unlabeled images, stacks and pairs of MapSage have pipelines of their own.
        or not dataset_class.__module__.startswith('mmseg.')
    ):
        return
    names = [str(step.get('type')).rsplit('.', 1)[-1] for step in steps]
    if loader != 'test_dataloader' and not any(
        name.startswith('Load') and name != 'LoadImageFromFile' for name in names
    ):
        yield (
            f'the pipeline ({", ".join(names)}) loads no labels: expected '
            f"dict(type='LoadAnnotations') after {names[0]}."
        )
    elif not names[-1].startswith('Pack'):
        yield (
            f"the pipeline ends with {names[-1]}: expected dict(type='PackSegInputs') as its last "
            f'transform, which makes the sample that a model takes.'
        )


def _class_of(registry: Any, kind: object) -> Optional[type]:
    """Return the class that a registry has under a name; None for an unknown name or a function."""
    if isinstance(kind, str):
        logging.disable(logging.WARNING)
        try:
            with registry.switch_scope_and_registry('mmseg') as scoped:
                kind = scoped.get(kind)
        finally:
            logging.disable(logging.NOTSET)
    return kind if isinstance(kind, type) else None
