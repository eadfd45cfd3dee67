"""The record of a run, ``WORK_DIR/TIMESTAMP/run.json``, from which its report is made.

The report hook replaces the file after every evaluation, so a killed run leaves a complete record
of its last evaluation. Configs are stored flat, as dotted keys, so that two of them can be
compared.
"""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional

from mapsage.base.errors import UserError
from mapsage.base.files import atomic_write, parse_json

RECORD = 'run.json'
# How Python's parser refuses deeply nested text.
_TOO_DEEP = RecursionError, MemoryError


class ReportError(UserError, ValueError):
    """No run was found to report on."""


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write a record atomically; numbers that are not finite become null.

    Raises:
        OSError: If the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # ASCII escapes can represent any name, also one with bytes that are not UTF-8.
    atomic_write(folder / RECORD, json.dumps(_plain(record), ensure_ascii=True).encode())


def read_record(folder: Path) -> Dict[str, Any]:
    """Return the record of a start; empty if the file is missing or cannot be read."""
    try:
        record = parse_json((folder / RECORD).read_text(encoding='utf-8'))
    except (OSError, ValueError):
        return {}
    return record if _is_record(record) else {}


def _is_record(record: Any) -> bool:
    """Return whether a value of JSON has the form of what ``RunReportHook`` writes."""
    if not isinstance(record, dict):
        return False
    counts = ('begin_iter', 'end_iter', 'max_iters', 'world_size')
    times = [record.get(name) or 0 for name in ('started', 'ended', 'written')]
    evaluations = record.get('evaluations') or []
    return (
        all(_is_number(record.get(name), int) for name in counts)
        and all(_is_number(time) and 0 <= time < 1e11 for time in times)
        and isinstance(evaluations, list)
        and all(map(_is_evaluation, evaluations))
    )


def _is_evaluation(stored: Any) -> bool:
    if not isinstance(stored, dict):
        return False
    metrics, tables = stored.get('metrics') or {}, stored.get('tables') or []
    return (
        _is_number(stored.get('iteration'), int)
        and isinstance(metrics, dict)
        and isinstance(tables, list)
        and all(map(_is_table, tables))
    )


def _is_table(table: Any) -> bool:
    if (
        not isinstance(table, dict)
        or not isinstance(table.get('classes'), list)
        or not isinstance(table.get('columns'), dict)
        or 'name' not in table
    ):
        return False
    size, matrix = len(table['classes']), table.get('matrix')
    rows = [*table['columns'].values(), *(matrix if isinstance(matrix, list) else [])]
    return (
        matrix is None
        or isinstance(matrix, list)
        and len(matrix) == size
        and all(isinstance(row, list) and None not in row for row in matrix)
    ) and all(
        isinstance(row, list) and len(row) == size and all(map(_is_number, row)) for row in rows
    )


def _is_number(value: Any, kind: Any = (int, float)) -> bool:
    """Return whether a value is a number of a size that something may have, or None."""
    return value is None or (
        isinstance(value, kind) and not isinstance(value, bool) and abs(value) < 1e18
    )


def flat_config(config: Mapping[str, Any]) -> Dict[str, str]:
    """Return a config as dotted key -> value as text.

    Dictionaries are flattened, and so are lists that contain a dictionary: ``hooks[0].type``.

    Args:
        config: Config as nested dictionaries.
    """
    flat: Dict[str, str] = {}
    for key, value in config.items():
        _flatten(str(key), value, flat)
    return flat


def config_of_file(path: Path) -> Dict[str, str]:
    """Return the :func:`flat_config` of a file that MMEngine dumped, without executing it.

    The result is empty if the file cannot be parsed. A value that is not a literal is returned as
    its source text.
    """
    try:
        source = path.read_text(encoding='utf-8', errors='surrogateescape')
        statements = ast.parse(source.encode('utf-8', 'replace')).body
    except (OSError, SyntaxError, ValueError, *_TOO_DEEP):
        return {}
    values: Dict[str, Any] = {}
    for statement in statements:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            try:
                value = _literal(statement.value)
            except (ValueError, TypeError, *_TOO_DEEP):
                segment = ast.get_source_segment(source, statement.value) or ''
                value = ' '.join(segment.split())
            values[statement.targets[0].id] = value
    return flat_config(values)


def _literal(node: ast.expr) -> object:
    """Return the value of a literal; ``dict(a=1)`` counts as a literal too.

    Raises:
        ValueError: If the expression is not a literal.
    """
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == 'dict'
        and not node.args
        and all(keyword.arg for keyword in node.keywords)
    ):
        return {keyword.arg: _literal(keyword.value) for keyword in node.keywords}
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {
            _literal(key): _literal(value)  # type: ignore[arg-type]
            for key, value in zip(node.keys, node.values)
        }
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [_literal(element) for element in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    return ast.literal_eval(node)


def _flatten(key: str, value: object, flat: Dict[str, str]) -> None:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            _flatten(f'{key}.{name}', inner, flat)
    elif isinstance(value, (list, tuple)) and _contains_mapping(value):
        for index, inner in enumerate(value):
            _flatten(f'{key}[{index}]', inner, flat)
    else:
        flat[key] = ' '.join(repr(value).split())


def _contains_mapping(value: object) -> bool:
    """Return whether a list contains a dictionary.

    Such a list is flattened, because the text of equal dictionaries depends on the order of keys.
    """
    return isinstance(value, Mapping) or (
        isinstance(value, (list, tuple)) and any(map(_contains_mapping, value))
    )


def _plain(value: object) -> object:
    """Return a value with types that JSON has: tensors become numbers, other objects text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(element) for element in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    number = finite(value)
    return number if number is not None or isinstance(value, float) else str(value)


def finite(value: Any) -> Optional[float]:
    """Return a number as a float; None if it is not finite or the value is not a number."""
    if isinstance(value, (str, bytes, bool)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def percentages(values: Iterable[object]) -> List[Optional[float]]:
    """Return fractions as percentages; undefined fractions become None."""
    fractions = [finite(value) for value in values]
    return [None if fraction is None else 100 * fraction for fraction in fractions]
