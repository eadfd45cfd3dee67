"""An object that stands for another, and functions that are replaced for a while.

Both change how code behaves that MapSage cannot edit: an object of a user or of MMEngine, a
function of PyTorch.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import ModuleType
from typing import Any, Iterator


class Delegate:
    """An object, or the base of one, that has all other attributes of the object that it stands for.

    Args:
        original: Object that it stands for.
        **replacements: Attributes that differ from the original's.

    Attributes:
        original: The argument of that name.
    """

    original: Any

    def __init__(self, original: Any, **replacements: Any) -> None:
        self.original = original
        vars(self).update(replacements)

    def __getattr__(self, name: str) -> Any:
        # Only for missing attributes. Pickle and copy ask for special methods before there is an
        # original.
        if name.startswith('__') or name == 'original':
            raise AttributeError(name)
        return getattr(self.original, name)


@contextmanager
def replaced(module: ModuleType, **replacements: Any) -> Iterator[None]:
    """Replace those attributes of a module that exist, and restore them at the end.

    Args:
        module: Module whose attributes are replaced for everybody.
        **replacements: Name of an attribute -> its value in the ``with`` block.
    """
    originals = {name: vars(module)[name] for name in replacements if name in vars(module)}
    vars(module).update({name: replacements[name] for name in originals})
    try:
        yield
    finally:
        vars(module).update(originals)
