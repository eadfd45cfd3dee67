"""The extras of MapSage: each folder of `mapsage/extras/` is one capability and can be deleted.

A folder has its code and a file ``extra.json``, the table by which the core finds it:

    commands        words of the command line, each with the "module" of the program and, optional,
                    "about", its line in the list of commands, and "without_hosts": true, if it runs
                    without PyTorch and the MM packages
    registers       modules that ``import mapsage`` imports, because they register classes
    extends         module that adds options to a program, by the program's name
    default_hooks   default hooks of a run: name of the class by its key in ``default_hooks``
    accelerators    classes of accelerators that are chosen by their names, as "module:class"
    run_extensions  classes of `RunExtension`, as "module:class"
    settings        keys of a config that have no effect without the extra; what is not a key,
                    such as a variable of the launcher, is checked where it is read

`mapsage/extras/known.json` lists the words, programs and registered names of all extras, so that
an error can say which extra is missing.
"""

from __future__ import annotations

import importlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

# Next to this package.
FOLDER = Path(__file__).resolve().parents[1] / 'mapsage' / 'extras'


class Extra(NamedTuple):
    """What an extra adds.

    Attributes:
        commands: Arguments of ``Command`` by the word of the command line.
        registers: Modules that register classes when they are imported.
        extends: Module by the name of the program to which it adds options. It has the functions
            ``add_options(parser)``, ``check_options(parser, args)``, ``is_asked(args)`` and, for a
            command line for which that is true, ``run(args)`` in place of the program's own work;
            of ``train`` and ``test``, ``run(args, cfg)``, which may change the config; of ``train``,
            it returns whether it took the place of the training; of ``view``, ``run(args)`` returns
            the rasters that are labeled in the file ``args.points`` (`LabelSource` of the viewer).
        default_hooks: Names of classes of hooks by their keys in ``default_hooks``.
        accelerators: Classes of accelerators, as ``'module:class'``.
        run_extensions: Classes of run extensions, likewise.
        settings: Keys of a config, such as ``'env_cfg.cross_check'``.
    """

    commands: Dict[str, Dict[str, Any]]
    registers: List[str]
    extends: Dict[str, str]
    default_hooks: Dict[str, str]
    accelerators: List[str]
    run_extensions: List[str]
    settings: List[str]


@lru_cache(maxsize=None)
def list_extras() -> Dict[str, Extra]:
    """Return the extras that are there, by the names of their folders."""
    extras = {}
    for path in sorted(FOLDER.glob('*/extra.json')):
        name, table = path.parent.name, json.loads(path.read_text(encoding='utf-8'))
        extras[name] = Extra(
            table.get('commands', {}),
            table.get('registers', []),
            table.get('extends', {}),
            table.get('default_hooks', {}),
            *(table.get(kind, []) for kind in ('accelerators', 'run_extensions', 'settings')),
        )
    return extras


def extensions_of(program: str) -> List[Any]:
    """Return the modules of extras that add options to a program."""
    return [
        importlib.import_module(extra.extends[program])
        for extra in list_extras().values()
        if program in extra.extends
    ]


def accelerators_of_extras() -> List[Any]:
    """Return the classes of accelerators that extras have."""
    return _classes([name for extra in list_extras().values() for name in extra.accelerators])


def run_extensions_of_extras() -> List[Any]:
    """Return the classes of run extensions that extras have."""
    return _classes([name for extra in list_extras().values() for name in extra.run_extensions])


def default_hooks_of_extras() -> Dict[str, str]:
    """Return the names of the default hooks that extras have, by their keys."""
    return {
        key: name for extra in list_extras().values() for key, name in extra.default_hooks.items()
    }


def _classes(names: List[str]) -> List[Any]:
    parts = [name.split(':') for name in names]
    return [getattr(importlib.import_module(module), kind) for module, kind in parts]


def names_of_missing_extras() -> List[str]:
    """Return the registered names and the settings of all extras that are not there."""
    known = json.loads((FOLDER / 'known.json').read_text(encoding='utf-8'))['names']
    return [name for extra, names in known.items() if not is_installed(extra) for name in names]


def is_installed(extra: str) -> bool:
    """Return whether the folder of an extra is there."""
    return (FOLDER / extra / 'extra.json').is_file()


def missing_extra(kind: str, name: str) -> Optional[str]:
    """Return a sentence if something belongs to an extra that is not there, else None.

    Args:
        kind: ``'programs'`` or ``'names'``.
        name: Word of the command line, name of a program, or a registered name.
    """
    known = json.loads((FOLDER / 'known.json').read_text(encoding='utf-8'))[kind]
    extra = next((extra for extra, names in known.items() if name in names), None)
    if extra is None or is_installed(extra):
        return None
    return (
        f'{name} belongs to the extra {extra!r}, which is not installed here: the folder '
        f'{FOLDER / extra} is missing. Install the whole package of mapsage.'
    )
