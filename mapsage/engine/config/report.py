"""Report of the differences between a run's config and the files that it inherits from.

The base is the result of MMEngine's merge of the ``_base_`` files. It is compared with the config
in memory, so ``--cfg-options`` and values that a tool has set are differences too. Base files are
read a second time for this; the config file and its ``custom_imports`` are not executed again.
"""

from __future__ import annotations

import ast
import os
import re
import tempfile
from typing import Any, Dict, List, Sequence, Tuple

from mmengine.config import Config
from mmengine.utils import get_installed_path


class _Missing:
    """The value of a key that one side does not have."""

    def __repr__(self) -> str:
        return '(absent)'


MISSING = _Missing()
SettingDifference = Tuple[str, Any, Any]

# Largest number of characters of one value in the report.
_VALUE_WIDTH = 56
# Characters of the settings in the headline.
_HEADLINE = 160


def base_files(cfg: Config) -> List[str]:
    """Return the paths of the files that ``cfg`` names in ``_base_``, in its order.

    Args:
        cfg: Config from ``Config.fromfile``, in either of MMEngine's two styles.

    Returns:
        Paths of the files; empty for a config without a file or without bases.
    """
    filename = _config_file(cfg)
    if not filename:
        return []
    if Config._is_lazy_import(filename):
        return _read_base_files(filename)
    return [path for path, _ in _scoped_base_files(filename)]


def config_differences(cfg: Config) -> List[SettingDifference]:
    """Compare a config with its merged ``_base_`` files.

    Args:
        cfg: Config in memory.

    Returns:
        Tuples ``(dotted key, base value or MISSING, value or MISSING)`` in the order of the keys.
        Dictionaries are compared key by key and lists as a whole. A list and a tuple of equal
        elements are equal. Empty for a config without a file or without bases.

    Raises:
        OSError: If a base file cannot be read.
    """
    filename = _config_file(cfg)
    if not filename or not base_files(cfg):
        return []
    base: Dict[str, Any] = {}
    if Config._is_lazy_import(filename):
        for path in _read_base_files(filename):
            base.update(Config.fromfile(path, import_custom_modules=False).to_dict())
    else:
        for path, scope in _scoped_base_files(filename):
            values = Config.fromfile(path, import_custom_modules=False)._cfg_dict
            # MMEngine writes the package that a base comes from (mmseg::...) into its dictionaries.
            base.update(Config._dict_to_config_dict(values, scope).to_dict())
    return _compare(base, cfg.to_dict(), '')


def format_differences(rows: Sequence[SettingDifference]) -> str:
    """Return the differences as aligned lines in which long values are shortened.

    If a list keeps its length, only the elements that have changed are shown.

    Args:
        rows: Differences that :func:`config_differences` has returned.

    Returns:
        One line per difference, or the line ``(no differences)``.
    """
    if not rows:
        return '  (no differences)'
    lines = [line for row in rows for line in _lines(*row)]
    key_width = max(len(key) for key, _, _ in lines)
    base_width = max(len(base) for _, base, _ in lines)
    return '\n'.join(
        f'  {key:<{key_width}}  {base:<{base_width}}  ->  {value}' for key, base, value in lines
    )


def config_report(cfg: Config) -> str:
    """Return the report for the log of a run.

    Args:
        cfg: Config in memory.

    Returns:
        A headline with the names of the config and its bases, and the differences below it.

    Raises:
        OSError: If a base file cannot be read.
    """
    if not cfg.filename:
        return 'config: built in memory, no file and so no base to compare with'
    if not _config_file(cfg):
        return f'config: {cfg.filename} no longer exists; its bases cannot be compared'
    bases = base_files(cfg)
    if not bases:
        return f'config: {cfg.filename} has no _base_, nothing to compare with'
    names = ', '.join(
        os.path.relpath(path, os.path.dirname(os.path.abspath(cfg.filename))) for path in bases
    )
    return f'config: {cfg.filename} against {names}\n{format_differences(config_differences(cfg))}'


def config_headline(cfg: Config) -> str:
    """Return the config, its bases and the first settings that differ from them, in one line.

    Empty for a config that has no bases: :func:`config_report` is one line then.
    """
    bases = base_files(cfg)
    if not bases:
        return ''
    rows = config_differences(cfg)
    names = ', '.join(os.path.basename(path) for path in bases)
    shown = ', '.join(f'{key}={_short(value)}' for key, _, value in rows if value is not MISSING)
    shown = shown if len(shown) <= _HEADLINE else f'{shown[:_HEADLINE]} ...'
    return (
        f'config: {cfg.filename}, {len(rows)} setting(s) differ from its base ({names}; all of them '
        f'are in the log file): {shown}'
    )


def _config_file(cfg: Config) -> str:
    """Return the absolute path of the config's file; empty if the file does not exist."""
    path = os.path.abspath(os.path.expanduser(cfg.filename)) if cfg.filename else ''
    return path if os.path.isfile(path) else ''


def _scoped_base_files(filename: str) -> List[Tuple[str, Any]]:
    """Return (path, scope) of the files in ``_base_``, in the way of ``Config._file2dict``.

    The ``{{ }}`` placeholders are substituted first: an environment variable may name a base.
    """
    with tempfile.TemporaryDirectory() as folder:
        substituted = os.path.join(folder, 'config' + os.path.splitext(filename)[1])
        Config._substitute_predefined_vars(filename, substituted)
        Config._substitute_env_variables(substituted, substituted)
        Config._pre_substitute_base_vars(substituted, substituted)
        names = Config._get_base_files(substituted)
    return [Config._get_cfg_path(name, filename) for name in names]


def _read_base_files(filename: str) -> List[str]:
    """Return the files imported under ``with read_base():``."""
    with open(filename, encoding='utf-8') as file:
        modules = Config._get_base_modules(ast.parse(file.read()).body)
    paths = []
    for module in modules:
        dots = re.match(r'\.*', module)
        level = len(dots.group()) if dots else 0
        names = module[level:].split('.')
        if level:
            folder = os.path.join(os.path.dirname(filename), *['..'] * (level - 1))
        else:
            folder = get_installed_path(names.pop(0))
        paths.append(os.path.normpath(os.path.join(folder, *names) + '.py'))
    return paths


def _compare(base: Dict[str, Any], value: Dict[str, Any], prefix: str) -> List[SettingDifference]:
    rows: List[SettingDifference] = []
    for key in list(base) + [key for key in value if key not in base]:
        name = f'{prefix}{key}'
        old, new = base.get(key, MISSING), value.get(key, MISSING)
        if isinstance(old, dict) and isinstance(new, dict):
            rows.extend(_compare(old, new, f'{name}.'))
        elif not _equal(old, new):
            rows.append((name, old, new))
    return rows


def _equal(old: object, new: object) -> bool:
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return len(old) == len(new) and all(map(_equal, old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_equal(old[key], new[key]) for key in old)
    if callable(old) and callable(new):
        # A base file that is read again defines new function objects.
        return _qualified_name(old) == _qualified_name(new)
    if isinstance(old, (bool, int, float)) and isinstance(new, (bool, int, float)):
        return isinstance(old, bool) == isinstance(new, bool) and (
            old == new or repr(old) == repr(new)
        )
    # A comparison of arrays is an array, not True or False, so the texts are compared.
    return type(old) is type(new) and repr(old) == repr(new)


def _qualified_name(function: object) -> Tuple[str, str]:
    return (getattr(function, '__module__', ''), getattr(function, '__qualname__', repr(function)))


def _lines(key: str, old: object, new: object) -> List[Tuple[str, str, str]]:
    """Return the printed (key, base, value) of one difference."""
    if not isinstance(old, (list, tuple)) or not isinstance(new, (list, tuple)):
        return [(key, _short(old), _short(new))]
    # Short lists are easier to read as a whole: (512, 512) rather than two lines of numbers.
    if len(old) != len(new) or len(repr(old)) <= _VALUE_WIDTH // 2:
        return [(key, _short(old), _short(new))]
    lines = []
    for index, (left, right) in enumerate(zip(old, new)):
        if isinstance(left, dict) and isinstance(right, dict):
            for row in _compare(left, right, f'{key}[{index}].'):
                lines.extend(_lines(*row))
        elif not _equal(left, right):
            lines.extend(_lines(f'{key}[{index}]', left, right))
    return lines


def _short(value: object) -> str:
    text = ' '.join(repr(value).split())
    if len(text) <= _VALUE_WIDTH:
        return text
    size = f' ({len(value)} items)' if isinstance(value, (list, tuple, dict)) else ''
    return text[: _VALUE_WIDTH - 4 - len(size)] + ' ...' + size
