"""Build what a training builds, to find out before the training what fails there."""
from __future__ import annotations

import copy
import itertools
import tempfile
from typing import Any, Optional

from mmengine.config import Config

from mapsage.distributed import error_text

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
    with tempfile.TemporaryDirectory(prefix='mapsage-doctor-') as folder:
        cfg.work_dir = folder
        try:
            runner: Any = cli.build_runner(cfg)
            if runner.optim_wrapper is not None:
                runner.build_optim_wrapper(runner.optim_wrapper)
            runner.refuse_training()
        except Exception as error:  # of any part that the user names; it becomes the report
            return error_text(error)
    return None
