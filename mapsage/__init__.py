"""MapSage: train remote-sensing segmentation models on GCU, CUDA, XLA or CPU clusters.

Importing the package has two effects: `compat` closes gaps in the host packages, and the other
rooms, and the extras that are there, register their classes with MMEngine. Without the host
packages only the version is there, which is enough to make maps from an exported model. So it is
where only a help text is printed.
"""

import gc

from mapsage_launcher.hosts import absent_hosts
from mapsage_launcher.only_help import is_only_help

# Without the host packages, `tools/predict.py --model` still makes maps.
if not is_only_help() and not absent_hosts():
    # `compat` comes first, because it decides whether mmseg can be imported.
    from . import compat  # noqa: F401

    # Modules live as long as the process. Without this, each full garbage collection would walk all
    # objects of PyTorch and the MM packages, the one that the imports below trigger included.
    gc.freeze()
    from . import datasets, engine, evaluation, models  # noqa: F401
    from .distributed import wrappers  # noqa: F401
    from .extras import register_extras
    from .sampling import hooks as _sampling_hooks  # noqa: F401

    register_extras()
from typing import Any

from .compat_paths import keep_old_paths
from .version import __version__  # noqa: F401

__all__ = ['__version__', 'load_model', 'predict', 'train']


def __getattr__(name: str) -> Any:
    # They import GDAL, which a training on images does not need.
    if name in ('load_model', 'predict', 'train'):
        from .commands import from_python

        return getattr(from_python, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


keep_old_paths()
