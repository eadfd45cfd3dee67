"""Build what a training builds, to find out before the training what fails there."""
from __future__ import annotations

import copy
import itertools
import tempfile
import warnings
from typing import Any, Iterator, List, Mapping, Optional, Tuple

from mmengine.config import Config
from mmengine.hooks import EMAHook
from mmengine.registry import DATA_SAMPLERS, LOOPS, MODELS, Registry

from mapsage.distributed import error_text
from mapsage.engine.config_mistakes import explain_config_error, unknown_arguments

from . import cli

_builds = itertools.count()
RUN_IS_BUILT = 'it can be built: logger, hooks, the model on its device, the optimizer'


def run_obstacle(cfg: Config) -> Optional[str]:
    """Return why the run of a config cannot be built on this rank, or None if it can.

    The logger, the hooks, the model on its device and in its wrapper, and the optimizer are those
    of the run. Its work dir is a temporary one, nothing is drawn or sent to a tracking server, and
    no weights are loaded. Of a run with encoder ranks, the head is built as if features were
    computed in place. Collective under a launcher.
    """
    cfg = copy.deepcopy(cfg)
    # MMEngine keeps loggers and visualizers by the name of their run, for the life of a process.
    cfg.update(resume=False, load_from=None, log_level='ERROR',
               experiment_name=f'doctor-{next(_builds)}',
               visualizer=dict(type='Visualizer', vis_backends=None))
    if (cfg.get('feature_source') or {}).get('type') == 'Streamed':
        cfg.pop('feature_source')
    with tempfile.TemporaryDirectory(prefix='mapsage-doctor-') as folder, \
            warnings.catch_warnings():
        warnings.simplefilter('ignore')  # the run shows them
        cfg.work_dir = folder
        try:
            runner: Any = cli.build_runner(cfg)
            _build_lazy_parts(runner, cfg)
            runner.refuse_training()
            return next(_unknown_settings(runner, cfg), None)
        except Exception as error:  # of any part that the user names; it becomes the report
            return error_text(explain_config_error(error))


def _build_lazy_parts(runner: Any, cfg: Config) -> None:
    """Build what a training builds at its start, but for what needs the data."""
    if runner.optim_wrapper is None:
        return
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    schedulers = cfg.get('param_scheduler')
    if isinstance(schedulers, (dict, list)) and not any(
            scheduler.get('convert_to_iter_based') for scheduler in _dicts(schedulers)):
        runner.build_param_scheduler(copy.deepcopy(schedulers))
    if cfg.get('val_evaluator'):
        runner.build_evaluator(copy.deepcopy(cfg.val_evaluator))


def _dicts(configs: Any) -> List[Any]:
    parts = configs if isinstance(configs, list) else [configs]
    return [part for part in parts if isinstance(part, Mapping)]


def _unknown_settings(runner: Any, cfg: Config) -> Iterator[str]:
    """Yield settings that a loop, a sampler or an averaged model does not take.

    These are built with the data or on the device, and only their signature is read here.
    """
    parts: List[Tuple[Registry, Any]] = [(LOOPS, cfg.get(f'{name}_cfg'))
                                         for name in ('train', 'val', 'test')]
    parts += [(DATA_SAMPLERS, (cfg.get(f'{name}_dataloader') or {}).get('sampler'))
              for name in ('train', 'val')]
    parts += [(MODELS, getattr(hook, 'ema_cfg', None)) for hook in runner.hooks
              if isinstance(hook, EMAHook)]
    for registry, config in parts:
        kind = config.get('type') if isinstance(config, Mapping) else None
        with registry.switch_scope_and_registry(None) as scoped:
            kind = scoped.get(kind) if isinstance(kind, str) else kind
        if callable(kind):
            mistake = unknown_arguments(kind, set(config) - {'type', '_scope_'})
            if mistake is not None:
                yield mistake
