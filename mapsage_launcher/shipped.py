"""The configs and programs that come with MapSage, in a checkout and in an installed wheel.
"""
from __future__ import annotations

import ast
import difflib
import filecmp
import os
import re
import shutil
from pathlib import Path
from typing import Dict, List

from mapsage_launcher.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1] / 'mapsage'
# In a wheel, what setup.py puts beside the modules, where OpenMIM looks for it; else the checkout.
SHIPPED = _PACKAGE / '.mim' if (_PACKAGE / '.mim').is_dir() else _PACKAGE.parent
CONFIGS = SHIPPED / 'configs'


class ShippedError(UserError, ValueError):
    """A config is not there, or cannot be copied; the message says what to do."""


def program(name: str) -> str:
    """Return what to type for a program of tools/, such as ``'train'``."""
    if _in_checkout():
        return f'python tools/{name}.py'
    return 'mapsage ' + {'prepare_data': 'prepare', 'suggest_labels': 'suggest',
                         'list_configs': 'configs'}.get(name, name)


def script(name: str) -> str:
    """Return what to type for a launcher of scripts/, such as ``'start_8card_training'``."""
    if _in_checkout():
        return f'bash scripts/{name}.sh'
    return 'mapsage launch' + ('' if name == 'start_8card_training' else f' {name}')


def in_words_of_here(text: str) -> str:
    """Return a text with the names of programs and launchers as they are typed here."""
    text = re.sub(r'(?:python )?tools/(\w+)\.py', lambda found: program(found.group(1)), text)
    return re.sub(r'(?:bash )?scripts/(\w+)\.sh', lambda found: script(found.group(1)), text)


def _in_checkout() -> bool:
    return SHIPPED == _PACKAGE.parent


def find_config(name: str) -> Path:
    """Return the path of a config: a file of the user, else one that comes with MapSage.

    Args:
        name: Path, or the name of a shipped config, ``demo/efficientnet_lite0_fpn_demo.py`` with or
            without ``configs/`` before it.

    Raises:
        ShippedError: If there is neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    if not path.is_absolute() and '..' not in path.parts:
        parts = path.parts[1:] if path.parts[:1] == ('configs', ) else path.parts
        shipped = CONFIGS.joinpath(*parts)
        if shipped.is_file():
            return shipped
    names = list(list_configs())
    names += [f'configs/{each}' for each in names]
    names += [path.as_posix() for path in Path('configs').glob('[!_]*/*.py')]  # the user's own
    near = difflib.get_close_matches(name, names, 1, 0.4)
    raise ShippedError(
        f'config file {name} does not exist.' + (f' Did you mean {near[0]}?' if near else '')
        + f' `{program("list_configs")}` lists those that come with MapSage.')


def list_configs() -> Dict[str, str]:
    """Return what each shipped config is, in the words of its first line, by its name."""
    found = {}
    for path in sorted(CONFIGS.glob('[!_]*/*.py')):
        about = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or ''
        found[path.relative_to(CONFIGS).as_posix()] = about.split('\n')[0]
    return found


def copy_configs(folder: str) -> List[str]:
    """Copy all shipped configs, with the files that they inherit from, and return the new names.

    Files that are there already and equal are left alone.

    Raises:
        ShippedError: If one of the files is there with other content; nothing is written then.
    """
    out = Path(folder)
    names = [path.relative_to(CONFIGS) for pattern in ('*.py', '*.txt')
             for path in sorted(CONFIGS.rglob(pattern))]
    there = [name for name in names if (out / name).exists()]
    changed = [name for name in there
               if not filecmp.cmp(str(CONFIGS / name), str(out / name), shallow=False)]
    if changed:
        raise ShippedError(
            f'{out / changed[0]} is there and differs from the one that comes with MapSage'
            + f' (and {len(changed) - 1} more)' * (len(changed) > 1)
            + '. Nothing is copied: choose another folder.')
    new = [name for name in names if name not in there]
    for name in new:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(CONFIGS / name), str(out / name))
    return [os.fspath(out / name) for name in new]
