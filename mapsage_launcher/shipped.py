"""The configs, programs and scripts of MapSage, in a checkout and in an installed wheel.

In a checkout they are in the folders configs/, tools/ and scripts/. A wheel has the same folders in
mapsage/.mim, where OpenMIM looks for them. Texts for users name `python tools/X.py` in a checkout
and `mapsage X` in a wheel (:func:`program`, :func:`name_installed_commands`).
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

# The package mapsage, whose folder is next to the one of this package.
PACKAGE = Path(__file__).resolve().parents[1] / 'mapsage'
# The folder of configs/, tools/ and scripts/.
SHIPPED = PACKAGE / '.mim' if (PACKAGE / '.mim').is_dir() else PACKAGE.parent
CONFIGS = SHIPPED / 'configs'
# A name that begins so is a shipped config's, as in _base_ of a config.
_SHIPPED_PREFIX = 'mapsage::'


class ShippedError(UserError, ValueError):
    """A config does not exist, or cannot be copied; the message says what to do."""


def program(name: str) -> str:
    """Return what to type for a program of tools/, such as ``'train'``."""
    if _in_checkout():
        return f'python {_beside(f"tools/{name}.py")}'
    return 'mapsage ' + {
        'prepare_data': 'prepare',
        'suggest_labels': 'suggest',
        'list_configs': 'configs',
        'list_operators': 'operators',
    }.get(name, name)


def script(name: str) -> str:
    """Return what to type for a launcher of scripts/, such as ``'start_8card_training'``."""
    if _in_checkout():
        return f'bash {_beside(f"scripts/{name}.sh")}'
    return 'mapsage launch' + ('' if name == 'start_8card_training' else f' {name}')


def name_installed_commands(text: str) -> str:
    """Return a text in which programs and launchers are named as this installation starts them."""
    text = re.sub(r'(?:python )?tools/(\w+)\.py', lambda match: program(match.group(1)), text)
    return re.sub(r'(?:bash )?scripts/(\w+)\.sh', lambda match: script(match.group(1)), text)


def _beside(path: str) -> str:
    """Return the path of a file of the checkout as a command in the current folder needs it."""
    return path if os.path.exists(path) else str(SHIPPED / path)


def _in_checkout() -> bool:
    return SHIPPED == PACKAGE.parent


def find_config(name: str) -> Path:
    """Return the path of a config: the user's file if it exists, else a shipped config.

    Args:
        name: Path, or the name of a shipped config, such as
            ``demo/efficientnet_lite0_fpn_demo.py``, with or without ``configs/`` in front;
            ``mapsage::demo/...`` is the shipped config even if the user has one of this name.

    Raises:
        ShippedError: If there is no such file and no such shipped config.
    """
    is_shipped = name.startswith(_SHIPPED_PREFIX)
    name = name[len(_SHIPPED_PREFIX) :] if is_shipped else name
    path = Path(name)
    if path.is_file() and not is_shipped:
        return path
    if path.is_dir() and not is_shipped:
        inside = sorted(file.as_posix() for file in path.glob('*.py'))
        raise ShippedError(
            f'{name} is a folder, expected a config file'
            + (f' such as {inside[0]}.' if inside else '; it has no .py file.')
        )
    if not path.is_absolute() and '..' not in path.parts:
        parts = path.parts[1:] if path.parts[:1] == ('configs',) else path.parts
        shipped = CONFIGS.joinpath(*parts)
        if shipped.is_file():
            return shipped
    names = list(list_configs())
    names += [f'configs/{shipped_name}' for shipped_name in names]
    # The user's configs.
    names += [path.as_posix() for path in Path('configs').glob('[!_]*/*.py')]
    near = difflib.get_close_matches(name, names, 1, 0.4)
    raise ShippedError(
        f'config file {name} does not exist.'
        + (f' Did you mean {near[0]}?' if near else '')
        + f' `{program("list_configs")}` lists those that come with MapSage.'
    )


def list_configs() -> Dict[str, str]:
    """Return the first line of each shipped config's docstring, by the config's name."""
    summaries = {}
    for path in sorted(CONFIGS.glob('[!_]*/*.py')):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or ''
        summaries[path.relative_to(CONFIGS).as_posix()] = docstring.split('\n')[0]
    return summaries


def copy_config(name: str, folder: str) -> str:
    """Copy one shipped config; return the new path.

    The copy inherits from the files that come with MapSage, ``_base_ = ['mapsage::...']``, so it
    works in any folder. Lists of names that it reads from beside itself are copied too.

    Raises:
        ShippedError: If there is no such config, or the new file exists.
    """
    shipped_name = name[len(_SHIPPED_PREFIX) :] if name.startswith(_SHIPPED_PREFIX) else name
    path = find_config(_SHIPPED_PREFIX + shipped_name)
    out = Path(folder) / path.name
    if out.exists():
        raise ShippedError(f'{out} is there. Nothing is copied: choose another folder.')
    text = path.read_text(encoding='utf-8')
    for statement in ast.parse(text).body:
        if (
            isinstance(statement, ast.Assign)
            and getattr(statement.targets[0], 'id', '') == '_base_'
        ):
            value = ast.literal_eval(statement.value)
            for base in [value] if isinstance(value, str) else value:
                if '::' not in base:
                    shipped = (path.parent / base).resolve().relative_to(CONFIGS.resolve())
                    text = text.replace(base, f'{_SHIPPED_PREFIX}{shipped.as_posix()}', 1)
    out.parent.mkdir(parents=True, exist_ok=True)
    for beside in re.findall(r'{{ fileDirname }}/([\w./-]+)', text):
        (out.parent / beside).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(path.parent / beside), str(out.parent / beside))
    out.write_text(text, encoding='utf-8')
    return os.fspath(out)


def copy_configs(folder: str) -> List[str]:
    """Copy all shipped configs and the files that they inherit from; return the new paths.

    A file that exists with the same content stays.

    Raises:
        ShippedError: If one of the files exists with other content. Nothing is written then.
    """
    out = Path(folder)
    names = [
        path.relative_to(CONFIGS)
        for pattern in ('*.py', '*.txt')
        for path in sorted(CONFIGS.rglob(pattern))
    ]
    existing = [name for name in names if (out / name).exists()]
    changed = [
        name
        for name in existing
        if not filecmp.cmp(str(CONFIGS / name), str(out / name), shallow=False)
    ]
    if changed:
        raise ShippedError(
            f'{out / changed[0]} is there and differs from the one that comes with MapSage'
            + f' (and {len(changed) - 1} more)' * (len(changed) > 1)
            + '. Nothing is copied: choose another folder.'
        )
    new = [name for name in names if name not in existing]
    for name in new:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(CONFIGS / name), str(out / name))
    return [os.fspath(out / name) for name in new]
