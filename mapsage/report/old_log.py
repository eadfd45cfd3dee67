"""What the log of a run says, for runs without a record and figures that no record holds."""
from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

Table = Tuple[Sequence[str], Dict[str, Sequence[Optional[float]]]]

_STAMPED = re.compile(r'(\d{4}/)?(\d\d/\d\d \d\d:\d\d:\d\d) - \S+ - \w+ - (.*)')
_ITERATION = re.compile(r'Iter\(train\) \[ *(\d+)/')
_EPOCH = re.compile(r'Epoch\(train\) +\[(\d+)\]\[ *(\d+)/ *(\d+)\]')
# The last line of an evaluation has its figures; those before it have the time that is left.
_EVALUATED = re.compile(r'(?:Iter|Epoch)\((val|test)\) *(?:\[\d+\])?\[ *(\d+)/ *\2\](?! *eta)(.*)')
_FIGURE = re.compile(r'(\S+): (-?\d+(?:\.\d+)?(?:e-?\d+)?)(?=\s|$)')
_RESUMED = re.compile(r'resumed epoch: \d+, iter: (\d+)')
_DEVICE = re.compile(r'accelerator (.*?)(?: \[.*\])?; world size (\d+)')
_CONFIG = re.compile(r'config: (\S.*?)(?: against .*| has no _base_.*)?$')


class LoggedEvaluation(NamedTuple):
    """An evaluation: ``'val'`` or ``'test'``, iteration, figures by name, tables by class."""

    phase: str
    iteration: int
    metrics: Dict[str, float]
    tables: List[Table]


@dataclass
class ReadLog:
    """What a log says.

    Attributes:
        found: Whether there is a log.
        kind: ``'train'`` or ``'test'``.
        config: Name of the config file; '' if it is not said.
        differences: Lines of the config against its bases; '' if they are not said.
        device: Accelerator in words; '' if it is not said.
        world_size: Number of ranks; 0 if it is not said.
        begin: Iteration that it resumed at.
        end: Last iteration of training that it logged.
        last_written: Time of its last line, seconds since 1970; 0 without a log.
        evaluations: Its evaluations in order.
    """

    found: bool = False
    kind: str = 'train'
    config: str = ''
    differences: str = ''
    device: str = ''
    world_size: int = 0
    begin: int = 0
    end: int = 0
    last_written: float = 0.0
    evaluations: List[LoggedEvaluation] = field(default_factory=list)


def read_log(folder: Path) -> ReadLog:
    """Read the log of a start; what cannot be read of it is left out.

    Args:
        folder: Folder of the start, ``WORK_DIR/TIMESTAMP``.
    """
    path = folder / f'{folder.name}.log'
    log = ReadLog()
    try:
        lines = path.read_text(encoding='utf-8', errors='backslashreplace').splitlines()
        log.last_written = path.stat().st_mtime
    except OSError:  # there is none, or it was moved by LoggerHook(keep_local=False)
        return log
    log.found = True
    tables: List[Table] = []
    trained = tested = False
    index = 0
    while index < len(lines):
        stamped = _STAMPED.match(lines[index])
        text = stamped.group(3) if stamped else lines[index]
        index += 1
        if text.startswith('+--'):
            table, index = _table(lines, index - 1)
            if table is not None:
                tables.append(table)
            continue
        if not stamped:
            continue
        if text.startswith('config: ') and not log.config:
            index = _read_config(log, text, lines, index)
            continue
        trained = trained or 'Iter(train)' in text or 'Epoch(train)' in text
        tested = tested or '(test)' in text
        _read_line(log, text)
        evaluated = _EVALUATED.search(text)
        if evaluated:
            phase, _, figures = evaluated.groups()
            metrics = {name: float(value) for name, value in _FIGURE.findall(figures)
                       if name not in ('time', 'data_time')}
            log.evaluations.append(LoggedEvaluation(
                phase, log.end if phase == 'val' else 0, metrics, tables))
            tables = []
    log.kind = 'test' if tested and not trained else 'train'
    _last_stamp(log, folder, lines)
    return log


def _read_line(log: ReadLog, text: str) -> None:
    iteration, epoch, resumed = _ITERATION.search(text), _EPOCH.search(text), _RESUMED.match(text)
    device = _DEVICE.match(text)
    if iteration:
        log.end = int(iteration.group(1))
    elif epoch:
        number, done, length = map(int, epoch.groups())
        log.end = (number - 1) * length + done
    elif resumed:
        log.begin = log.end = int(resumed.group(1))
    elif device and not log.device:
        log.device, log.world_size = device.group(1), int(device.group(2))


def _read_config(log: ReadLog, text: str, lines: Sequence[str], index: int) -> int:
    """Read the lines about the config, of which the last is the one before the next stamp."""
    name = _CONFIG.match(text)
    if name:
        log.config = re.split(r'[/\\]', name.group(1))[-1]
    kept = [text]
    while index < len(lines) and not _STAMPED.match(lines[index]):
        kept.append(lines[index])
        index += 1
    log.differences = '\n'.join(kept)
    return index


def _table(lines: Sequence[str], index: int) -> Tuple[Optional[Table], int]:
    """Read the table of classes whose first line is ``index``; return it and the line behind it.

    A table without a column ``Class`` is another one: None.
    """
    rows = []
    while index < len(lines) and lines[index][:1] in ('+', '|'):
        if lines[index].startswith('|'):
            rows.append([cell.strip() for cell in lines[index].strip().strip('|').split('|')])
        index += 1
    if not rows or rows[0][0] != 'Class' or any(len(row) != len(rows[0]) for row in rows):
        return None, index
    names = [row[0] for row in rows[1:]]
    columns: Dict[str, Sequence[Optional[float]]] = {
        title: [_number(row[place]) for row in rows[1:]]
        for place, title in enumerate(rows[0]) if place}
    return (names, columns), index


def _number(text: str) -> Optional[float]:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value == value else None


def _last_stamp(log: ReadLog, folder: Path, lines: Sequence[str]) -> None:
    """Take the time of the last line, which a copy of the file keeps; it has no year."""
    for line in reversed(lines):
        stamped = _STAMPED.match(line)
        if stamped:
            try:
                started = datetime.strptime(folder.name, '%Y%m%d_%H%M%S')
                last = datetime.strptime(f'{started.year}/{stamped.group(2)}',
                                         '%Y/%m/%d %H:%M:%S')
                if last < started:
                    last = last.replace(year=started.year + 1)
            except ValueError:
                return
            log.last_written = last.timestamp()
            return
