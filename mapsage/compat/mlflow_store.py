"""Let ``MLflowVisBackend`` work without arguments.

Gap: mmengine's backend opens a ``file:`` store unless the config names another, and mlflow 3 has
an error for it ("the filesystem tracking backend is in maintenance mode"). At its end it uploads
every log in the work dir, those of earlier runs and copies among its own artifacts too, which
doubles them each time.
Remove when: ``MLflowVisBackend`` of every supported mmengine has a default that mlflow 3 accepts,
and uploads the files of its own run.
"""
from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Callable, Set

from mmengine.utils import scandir
from mmengine.visualization import MLflowVisBackend

_URI_VARIABLE = 'MLFLOW_TRACKING_URI'
_ARTIFACTS = 'mlflow-artifacts'
_STAMP = re.compile(r'\d{8}_\d{6}')
_made: Set[str] = set()  # stores of this process, which mlflow puts into that variable


def apply() -> None:
    """Replace how the backend chooses its store, and what it uploads at the end."""
    MLflowVisBackend._init_env = _with_defaults(MLflowVisBackend._init_env)
    MLflowVisBackend.close = _close


def _with_defaults(init_env: Callable[[Any], None]) -> Callable[[Any], None]:
    def chosen(backend: Any) -> None:
        """Use the config's store, else that of the environment, else a database in the work dir."""
        folder = Path(os.path.abspath(backend._save_dir))
        run = folder.parent if _STAMP.fullmatch(folder.parent.name) else None
        work_dir = folder if run is None else run.parent
        given = os.environ.get(_URI_VARIABLE)
        if backend._tracking_uri is None and given and given not in _made:
            backend._tracking_uri = given
        elif backend._tracking_uri is None:
            work_dir.mkdir(parents=True, exist_ok=True)
            backend._tracking_uri = f'sqlite:///{work_dir}/mlflow.db'
            _made.add(backend._tracking_uri)
            # A database's own default is a folder where the program was started; and its
            # experiment 'Default' is there already, with that folder.
            backend._artifact_location = backend._artifact_location or \
                (work_dir / _ARTIFACTS).as_uri()
            backend._exp_name = backend._exp_name or work_dir.name
        if run is not None:
            backend._run_name = backend._run_name or run.name
        init_env(backend)

    return chosen


def _close(backend: Any) -> None:
    """Upload the logs of this run, and the config, and end it."""
    if not hasattr(backend, '_mlflow'):
        return
    cfg = getattr(backend, 'cfg', None)
    if cfg is not None:  # None after an error in the first lines of a run
        work_dir, suffix = os.path.abspath(cfg.work_dir), backend._artifact_suffix
        run = os.path.relpath(os.path.dirname(os.path.abspath(backend._save_dir)), work_dir)
        for name in scandir(work_dir, suffix, recursive=True):
            folder = os.path.dirname(name)
            of_a_run = _STAMP.match(name)  # WORK_DIR/TIMESTAMP/..., or WORK_DIR/TIMESTAMP.py
            if not name.startswith(_ARTIFACTS) and (of_a_run is None or of_a_run.group() == run):
                backend._mlflow.log_artifact(os.path.join(work_dir, name), folder or None)
    backend._mlflow.end_run()
