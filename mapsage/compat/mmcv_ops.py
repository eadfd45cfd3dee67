"""Make mmseg importable if mmcv has no compiled ops.

Gap: ``mmseg.models`` 1.2.2 imports ``mmcv.ops`` unguarded (losses/focal_loss.py, san_head.py,
utils/point_sample.py, utils/mask_classification.py), and ``mmcv.ops`` loads ``mmcv._ext``, which
mmcv-lite does not have. onedl-mmsegmentation guards these imports, and its modules keep ``None``
for every op if they are imported before MapSage; so do modules of mmcv and of users.
Remove when: every supported mmseg imports without ``mmcv._ext``.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any, Callable, Iterator, List, Tuple

from mapsage.base.errors import UserError

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
                f'onedl-mmcv built with MMCV_WITH_OPS=1), or choose a model that needs none.'
            )

        missing.__name__ = name
        return missing


def apply() -> bool:
    """Install the stand-in if it is needed, and return whether it was."""
    # Looking for the extension imports mmcv, so the modules before that are listed here.
    modules = list(sys.modules.values()) if 'mmcv' in sys.modules else []
    if EXTENSION in sys.modules or importlib.util.find_spec('mmcv') is None:
        return False
    if importlib.util.find_spec(EXTENSION) is not None:
        return False
    extension = _MissingOps(EXTENSION)
    extension.__file__ = __file__
    # mmengine calls pkgutil.find_loader, which needs a spec.
    extension.__spec__ = importlib.machinery.ModuleSpec(EXTENSION, None)
    sys.modules[EXTENSION] = extension
    for module in modules:
        _bind_missing_ops(module)
    return True


def _bind_missing_ops(module: types.ModuleType) -> None:
    """Import what a module's guarded imports of ``mmcv.ops`` did not find when it was imported.

    A name that the module has bound otherwise, to a replacement of the op, is left alone.
    """
    for imports in _guarded_imports(module):
        if any(f'{source}.{name}.'.startswith('mmcv.ops.') for _, source, name in imports):
            importlib.import_module('mmcv.ops')
            for bound_name, source, name in imports:
                if getattr(module, bound_name, None) is None:
                    setattr(
                        module, bound_name, getattr(importlib.import_module(source), name, None)
                    )


def _guarded_imports(module: types.ModuleType) -> Iterator[List[Tuple[str, str, str]]]:
    """Yield the imports of each ``try`` block at the top of a module that may import mmcv's ops.

    Yields:
        Tuples ``(bound_name, source, name)`` for ``from source import name as bound_name``.
    """
    file = getattr(module, '__file__', None)
    try:
        text = Path(file).read_bytes() if isinstance(file, str) and file.endswith('.py') else b''
        blocks = ast.parse(text).body if b'mmcv' in text and b'ops' in text else []
    # A module in an archive, or whose file has been removed or edited since it was imported.
    except (OSError, SyntaxError):
        return
    for block in blocks:
        if isinstance(block, ast.Try):
            yield [
                (
                    alias.asname or alias.name,
                    importlib.util.resolve_name(
                        '.' * statement.level + (statement.module or ''), module.__package__
                    ),
                    alias.name,
                )
                for statement in block.body
                if isinstance(statement, ast.ImportFrom)
                for alias in statement.names
            ]
