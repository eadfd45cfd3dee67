"""Make mmseg importable if mmcv has no compiled ops.

Gap: ``mmseg.models`` 1.2.2 imports ``mmcv.ops`` unguarded (losses/focal_loss.py, san_head.py,
utils/point_sample.py, utils/mask_classification.py), and ``mmcv.ops`` loads ``mmcv._ext``, which
mmcv-lite does not have.
Remove when: every supported mmseg imports without ``mmcv._ext``.
"""
from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from typing import Any, Callable

from mapsage.errors import UserError

EXTENSION = 'mmcv._ext'


class MissingOpError(UserError, RuntimeError):
    """A compiled mmcv op was called, but the installed mmcv has none."""


class _MissingOps(types.ModuleType):
    """Stand-in for ``mmcv._ext``: any op can be imported, and its call says what to install."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith('__'):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> None:
            raise MissingOpError(
                f'the compiled mmcv op {name!r} was called, and the installed mmcv has no compiled '
                f'ops. Install a full mmcv built for your torch (`pip install "mmcv<2.2.0"`, or '
                f'onedl-mmcv built with MMCV_WITH_OPS=1), or choose a model that needs none.')

        missing.__name__ = name
        return missing


def apply() -> bool:
    """Install the stand-in if it is needed, and return whether it was."""
    if EXTENSION in sys.modules or importlib.util.find_spec('mmcv') is None:
        return False
    if importlib.util.find_spec(EXTENSION) is not None:
        return False
    module = _MissingOps(EXTENSION)
    module.__file__ = __file__
    # mmengine calls pkgutil.find_loader, which needs a spec.
    module.__spec__ = importlib.machinery.ModuleSpec(EXTENSION, None)
    sys.modules[EXTENSION] = module
    return True
