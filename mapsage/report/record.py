"""What a run notes for its report, in ``WORK_DIR/TIMESTAMP/run.json``.

A work dir has such a folder for every start of a program. The file is replaced whole, so that a
run that is killed leaves the state of its last evaluation.
"""
from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

from mapsage.atomic_write import atomic_write
from mapsage.errors import UserError

RECORD = 'run.json'


class ReportError(UserError, ValueError):
    """There is no run to report on."""


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write a record in one step; its figures that are not finite become null.

    Raises:
        OSError: If the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Escapes hold any text, also names that are no UTF-8.
    atomic_write(folder / RECORD, json.dumps(_plain(record), ensure_ascii=True).encode())


def read_record(folder: Path) -> Dict[str, Any]:
    """Return the record of a start; empty if there is none or it cannot be read."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding='utf-8'))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def flat_config(config: Mapping[str, Any]) -> Dict[str, str]:
    """Return a config as text by dotted keys, so that two of them can be compared.

    Dictionaries are entered, and so are lists with a dictionary somewhere in them:
    ``hooks[0].type``.

    Args:
        config: Config as nested dictionaries.
    """
    found: Dict[str, str] = {}
    for key, value in config.items():
        _flatten(str(key), value, found)
    return found


def config_of_file(path: Path) -> Dict[str, str]:
    """Return the :func:`flat_config` of a file that MMEngine dumped, without executing it.

    Empty if it cannot be read. A value that is no literal is given as it is written.
    """
    try:
        source = path.read_text(encoding='utf-8', errors='surrogateescape')
        statements = ast.parse(source.encode('utf-8', 'replace')).body
    except (OSError, SyntaxError, ValueError):
        return {}
    values: Dict[str, Any] = {}
    for each in statements:
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            try:
                value = _literal(each.value)
            except ValueError:
                value = ' '.join((ast.get_source_segment(source, each.value) or '').split())
            values[each.targets[0].id] = value
    return flat_config(values)


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, in which ``dict(a=1)`` counts as one."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == 'dict' \
            and not node.args and all(each.arg for each in node.keywords):
        return {each.arg: _literal(each.value) for each in node.keywords}
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_literal(key): _literal(value)  # type: ignore[arg-type]
                for key, value in zip(node.keys, node.values)}
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [_literal(each) for each in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    return ast.literal_eval(node)


def _flatten(key: str, value: Any, found: Dict[str, str]) -> None:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            _flatten(f'{key}.{name}', inner, found)
    elif isinstance(value, (list, tuple)) and _has_mapping(value):
        for index, inner in enumerate(value):
            _flatten(f'{key}[{index}]', inner, found)
    else:
        found[key] = ' '.join(repr(value).split())


def _has_mapping(value: Any) -> bool:
    """Return whether a list has a dictionary in it, whose keys have no order."""
    return isinstance(value, Mapping) or (
        isinstance(value, (list, tuple)) and any(map(_has_mapping, value)))


def _plain(value: Any) -> Any:
    """Return a value as JSON holds it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    number = finite(value)
    return number if number is not None or isinstance(value, float) else str(value)


def finite(value: Any) -> Optional[float]:
    """Return a number as a float; None for what is not finite or no number."""
    if isinstance(value, (str, bytes, bool)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def percentages(values: Any) -> List[Optional[float]]:
    """Return fractions as percentages; undefined ones are None."""
    found = [finite(each) for each in values]
    return [None if each is None else 100 * each for each in found]
