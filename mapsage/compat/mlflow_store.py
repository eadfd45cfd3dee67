"""Let ``MLflowVisBackend`` work without arguments.

Gap: mmengine's backend opens a ``file:`` store unless the config names another store, and mlflow 3
refuses it ("the filesystem tracking backend is in maintenance mode"). At the end of a run it
uploads every log in the work dir, including logs of earlier runs and the copies in its artifact
store, which doubles them each time.
Remove when: ``MLflowVisBackend`` of every supported mmengine has a default that mlflow 3 accepts,
and uploads only the files of the run.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Callable, Set

from mmengine.utils import scandir
from mmengine.visualization import MLflowVisBackend

_URI_VARIABLE = 'MLFLOW_TRACKING_URI'
_ARTIFACTS = 'mlflow-artifacts'
_STAMP = re.compile(r'\d{8}_\d{6}')
# URIs of stores that this process has chosen. mlflow writes them into the variable, where they must
# not be mistaken for a choice of the user.
_chosen_uris: Set[str] = set()


def apply() -> None:
    """Replace the backend's choice of a store, and its upload at the end."""
    MLflowVisBackend._init_env = _with_defaults(MLflowVisBackend._init_env)
    MLflowVisBackend.close = _close


def _with_defaults(
    init_env: Callable[[MLflowVisBackend], None],
) -> Callable[[MLflowVisBackend], None]:
    def init_with_defaults(backend: MLflowVisBackend) -> None:
        """Use the store of the config, of the environment, or a database in the work dir."""
        folder = Path(os.path.abspath(backend._save_dir))
        run = folder.parent if _STAMP.fullmatch(folder.parent.name) else None
        work_dir = folder if run is None else run.parent
        users_uri = os.environ.get(_URI_VARIABLE)
        if backend._tracking_uri is None and users_uri and users_uri not in _chosen_uris:
            backend._tracking_uri = users_uri
        elif backend._tracking_uri is None:
            work_dir.mkdir(parents=True, exist_ok=True)
            backend._tracking_uri = f'sqlite:///{work_dir}/mlflow.db'
            _chosen_uris.add(backend._tracking_uri)
            # By default, a database stores artifacts in the folder where the program was started,
            # and the existing experiment 'Default' would do so too.
            backend._artifact_location = (
                backend._artifact_location or (work_dir / _ARTIFACTS).as_uri()
            )
            backend._exp_name = backend._exp_name or work_dir.name
        if run is not None:
            backend._run_name = backend._run_name or run.name
        init_env(backend)

    return init_with_defaults


def _close(backend: MLflowVisBackend) -> None:
    """Upload the logs of this run and the config, and end the run."""
    if not hasattr(backend, '_mlflow'):
        return
    cfg = getattr(backend, 'cfg', None)
    # None after an error at the beginning of a run.
    if cfg is not None:
        work_dir, suffix = os.path.abspath(cfg.work_dir), backend._artifact_suffix
        run = os.path.relpath(os.path.dirname(os.path.abspath(backend._save_dir)), work_dir)
        for name in scandir(work_dir, suffix, recursive=True):
            folder = os.path.dirname(name)
            # WORK_DIR/TIMESTAMP/..., or WORK_DIR/TIMESTAMP.py.
            stamp = _STAMP.match(name)
            if not name.startswith(_ARTIFACTS) and (stamp is None or stamp.group() == run):
                backend._mlflow.log_artifact(os.path.join(work_dir, name), folder or None)
    backend._mlflow.end_run()
