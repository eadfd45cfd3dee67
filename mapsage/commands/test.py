"""Evaluate a checkpoint: on one device, or as one rank of a launcher.

python tools/test.py CONFIG CHECKPOINT [--tta] [--calibration] [--out DIR] [--show-dir DIR]
    [--show]
bash scripts/test.sh CONFIG CHECKPOINT [options of this program]

MMSegmentation's `tta_pipeline` is usually inherited from a base config and loads image files. Where
the dataset loads its images in another way (windows of scenes), `--tta` puts the loading transforms
of its test pipeline in place of those in the `tta_pipeline`.
"""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Sequence, Set

from mapsage.commands import options
from mapsage_launcher.extras import extensions_of

if TYPE_CHECKING:
    from mmengine.config import Config

_IMAGE_FILE, _MASK_FILE = 'LoadImageFromFile', 'LoadAnnotations'


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run the program with a command line (default: ``sys.argv``)."""
    parser = options.build_parser('Evaluate a segmentation model.', doc=__doc__)
    parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument('--out', help='write the predicted masks into this folder')
    parser.add_argument('--show-dir', help='write pictures of the predictions into this folder')
    parser.add_argument('--show', action='store_true', help='show the predictions in a window')
    parser.add_argument(
        '--wait-time',
        type=float,
        default=2,
        metavar='S',
        help='seconds for which --show shows a prediction (default: 2)',
    )
    parser.add_argument(
        '--tta',
        action='store_true',
        help="test-time augmentation: the config's tta_pipeline, or else every "
        'image with its two mirror images',
    )
    extensions = extensions_of('test')
    for extension in extensions:
        extension.add_options(parser)
    args = parser.parse_args(argv)
    from mapsage.commands import cli

    cfg = cli.load_config(args)
    cfg.work_dir = args.work_dir or test_folder(cfg, args.checkpoint)
    cfg.load_from = args.checkpoint
    cfg.resume = False
    # Only trainings use it.
    cfg.pop('feature_source', None)
    if args.out:
        write_masks_to(cfg, args.out)
    for extension in extensions:
        if extension.is_asked(args):
            extension.run(args, cfg)
    if args.show_dir or args.show:
        draw_predictions(cfg, args.show_dir, args.show, args.wait_time)
    if args.tta:
        use_tta(cfg)
    cli.build_runner(cfg).test()


def test_folder(cfg: Config, checkpoint: str) -> str:
    """Return the default work dir of a test: the folder ``test`` next to its checkpoint.

    A separate folder, because a test in the training's work dir would replace its config and its
    pictures. If the checkpoint is a URL, or its folder cannot be written, the folder is in the
    config's work dir.
    """
    folder = os.path.dirname(os.path.abspath(checkpoint))
    is_writable = '://' not in checkpoint and os.access(folder, os.W_OK)
    return str(Path(folder if is_writable else cfg.work_dir) / 'test')


def write_masks_to(cfg: Config, folder: str) -> None:
    """Make the evaluator write predicted masks (uint8, PNG) into ``folder`` and not delete them.

    Raises:
        ConfigError: If no metric of the test can write masks.
    """
    from mapsage.engine.env_cfg import ConfigError

    evaluators = (
        cfg.test_evaluator if isinstance(cfg.test_evaluator, list) else [cfg.test_evaluator]
    )
    for evaluator in evaluators:
        arguments = _metric_arguments(cfg, evaluator.get('type'))
        if 'output_dir' in arguments:
            evaluator.output_dir = folder
            # CityscapesMetric deletes the masks otherwise.
            if 'keep_results' in arguments:
                evaluator.keep_results = True
            return
    raise ConfigError(
        f'--out needs a metric with an output_dir in test_evaluator, such as '
        f'IoUMetric, ConfusionMatrixMetric or CityscapesMetric, got {evaluators}.'
    )


def _metric_arguments(cfg: Config, kind: object) -> Set[str]:
    """Return the names of a metric's arguments; empty if the metric is unknown."""
    from mmengine.registry import METRICS

    with METRICS.switch_scope_and_registry(cfg.get('default_scope', 'mmseg')) as registry:
        metric = registry.get(kind) if isinstance(kind, str) else kind
    return set(inspect.signature(metric).parameters) if callable(metric) else set()


def draw_predictions(cfg: Config, folder: Optional[str], show: bool, wait_time: float) -> None:
    """Draw every prediction with the config's visualization hook, else with MMSeg's.

    Args:
        cfg: Config of the test.
        folder: Folder of the pictures; None to write no pictures.
        show: Whether to show each prediction in a window, which needs a display. As in
            MMSegmentation, no picture is written then.
        wait_time: Seconds for which a window is shown.

    Raises:
        ConfigError: If ``show`` is set and there is no display.
    """
    from mapsage.engine.env_cfg import ConfigError

    if (
        show
        and sys.platform == 'linux'
        and not (os.environ.get('DISPLAY') or os.environ.get('WAYLAND_DISPLAY'))
    ):
        raise ConfigError(
            '--show needs a display, and this session has none (DISPLAY is not set). '
            'Use --show-dir DIR to write the pictures instead.'
        )
    hooks = dict(cfg.get('default_hooks') or {})
    hook = dict(hooks.get('visualization') or dict(type='SegVisualizationHook', interval=1))
    hook.update(draw=True)
    if show:
        hook.update(show=True, wait_time=wait_time)
    cfg.default_hooks = dict(hooks, visualization=hook)
    visualizer = dict(
        cfg.get('visualizer')
        or dict(
            type='SegLocalVisualizer',
            name='visualizer',
            vis_backends=[dict(type='LocalVisBackend')],
        )
    )
    if folder:
        visualizer['save_dir'] = folder
    cfg.visualizer = visualizer


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
    from mapsage.engine.env_cfg import ConfigError

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
    from mmengine.logging import print_log

    if os.environ.get('RANK', '0') == '0':
        print_log(f'--tta: {line}')


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
