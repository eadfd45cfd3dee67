"""Reads the runs of a work dir: its starts in order, those that were resumed joined to one run."""
from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from .old_log import ReadLog, read_log
from .record import ReportError, config_of_file, finite, read_record

_STAMP = re.compile(r'\d{8}_\d{6}$')
Points = List[Tuple[float, float]]
# Keys of a line of scalars that are no curves.
_COUNTERS = ('step', 'iter', 'epoch')


class ClassTable(NamedTuple):
    """Figures of the classes in one evaluation.

    Attributes:
        name: Prefix of the evaluator's figures; often empty.
        classes: Names of the C classes.
        columns: Percentages by the name of the figure, each of length C; None if undefined.
        matrix: Confusion matrix ``(C, C)``, rows are the truth; None if it is not known.
    """

    name: str
    classes: Sequence[str]
    columns: Dict[str, Sequence[Optional[float]]]
    matrix: Optional[Sequence[Sequence[int]]] = None


def not_comparable(tables: Sequence[ClassTable]) -> str:
    """Return a warning where figures are of different classes or labels; '' if not."""
    if len({tuple(each.classes) for each in tables}) > 1:
        return 'The runs have different classes: their means are of different things.'
    if len({tuple(sum(row) for row in each.matrix) for each in tables if each.matrix}) > 1:
        return 'The runs were scored on different labels: the validation sets are not the same.'
    return ''


@dataclass
class Evaluation:
    """One validation or test.

    Attributes:
        phase: ``'val'`` or ``'test'``.
        iteration: Optimizer steps before it; 0 for a test of a checkpoint.
        metrics: Figures by name.
        tables: Figures by class, one for each evaluator that gives them.
    """

    phase: str
    iteration: int
    metrics: Dict[str, float] = field(default_factory=dict)
    tables: List[ClassTable] = field(default_factory=list)


@dataclass
class Start:
    """One start of a program in a work dir.

    Attributes:
        folder: Folder named by the time of the start.
        record: Content of its ``run.json``; empty for a run of an earlier version.
        log: What its log says.
        scalars: Lines of scalars of the training.
        evaluations: Its validations and tests.
    """

    folder: Path
    record: Dict[str, Any]
    log: ReadLog
    scalars: List[Dict[str, Any]]
    evaluations: List[Evaluation]

    @property
    def trains(self) -> bool:
        """Whether it trained, or began to."""
        return bool(self.record.get('kind', self.log.kind) == 'train')

    @property
    def begin(self) -> int:
        """Iteration of the checkpoint that it resumed; 0 without one."""
        return int(self.record.get('begin_iter', self.log.begin))

    @property
    def end(self) -> int:
        """Last iteration that is known of it."""
        known = [self.begin, int(self.record.get('end_iter') or 0), self.log.end]
        return max(known + [int(_step(row)) for row in self.scalars])

    @property
    def started(self) -> float:
        """Time of the start, seconds since 1970."""
        given = finite(self.record.get('started'))
        if given is not None:
            return given
        return datetime.strptime(self.folder.name, '%Y%m%d_%H%M%S').timestamp()

    @property
    def seconds(self) -> float:
        """Wall-clock time up to its end, or to the last thing that it wrote."""
        last = finite(self.record.get('ended')) or finite(self.record.get('written'))
        return max(0.0, (last or self.log.last_written or self.started) - self.started)

    @property
    def status(self) -> str:
        """How it ended, in words."""
        if not self.record:
            return 'not recorded'
        return str(self.record.get('status', 'running'))


@dataclass
class Run:
    """A training, or tests without one, over all the starts that continued it.

    Attributes:
        name: Name of its folder, and the time of its first start if it is not the folder's last.
        work_dir: Folder of the run.
        starts: Its starts in order, at least one.
        is_last: Whether no other training began in the folder since, so that preview, maps and
            sampling records of the folder are its own.
    """

    name: str
    work_dir: Path
    starts: List[Start]
    is_last: bool = True

    @property
    def last(self) -> Start:
        """The last start that trained; the last of all where none did."""
        return ([each for each in self.starts if each.trains] or self.starts)[-1]

    @property
    def config_name(self) -> str:
        """Name of the config file, or of the experiment."""
        return str(self.last.record.get('config') or self.last.log.config or self.work_dir.name)

    @property
    def iterations(self) -> int:
        """Optimizer steps of the weights that it ended with."""
        return self.last.end

    @property
    def seconds(self) -> float:
        """Wall-clock time of all starts that trained."""
        return sum(each.seconds for each in self.starts if each.trains)

    def config(self) -> Dict[str, str]:
        """Return its config by dotted keys; empty if it is not known."""
        stored = self.last.record.get('flat_config')
        if isinstance(stored, dict) and stored:
            return {str(key): str(value) for key, value in stored.items()}
        return config_of_file(self.last.folder / 'vis_data' / 'config.py')

    def curves(self) -> Dict[str, Points]:
        """Return what was logged in training, by key: points (iteration, value)."""
        found: Dict[str, Points] = {}
        for start in self.starts:
            if not start.trains:
                continue
            for points in found.values():  # a resume repeats what came behind its checkpoint
                while points and points[-1][0] > start.begin:
                    points.pop()
            for row in start.scalars:
                for key, value in row.items():
                    number = finite(value)
                    if key not in _COUNTERS and number is not None:
                        found.setdefault(key, []).append((_step(row), number))
        return {key: points for key, points in found.items() if points}

    def evaluations(self, phase: str = 'val') -> List[Evaluation]:
        """Return its validations, or tests, in order, without those of weights that were lost."""
        found: List[Evaluation] = []
        for start in self.starts:
            if start.trains and phase == 'val':
                while found and found[-1].iteration > start.begin:
                    found.pop()
            found += [each for each in start.evaluations if each.phase == phase]
        return found

    def final(self) -> Optional[Evaluation]:
        """Return its last validation, else its last test."""
        return (self.evaluations() or self.evaluations('test') or [None])[-1]  # type: ignore

    def score(self) -> Tuple[str, Points]:
        """Return the name of the main figure, mIoU where there is one, and its course."""
        found = self.evaluations() or self.evaluations('test')
        names = [name for each in found for name in each.metrics]
        chosen = next((name for name in names if name.split('/')[-1] == 'mIoU'),
                      names[0] if names else '')
        return chosen, [(each.iteration, each.metrics[chosen])
                        for each in found if chosen in each.metrics]


def read_runs(work_dir: Union[str, Path]) -> List[Run]:
    """Read the runs of a work dir, the oldest first.

    Raises:
        ReportError: If the folder does not exist, or has no run of MMEngine in it.
    """
    folder = Path(work_dir)
    if not folder.is_dir():
        raise ReportError(f'the folder {folder} does not exist, expected the work dir of a run')
    starts = [_read_start(each) for each in sorted(folder.iterdir())
              if _STAMP.match(each.name) and each.is_dir()]
    starts = [each for each in starts if each.record or each.log.found or each.scalars]
    if not starts:
        raise ReportError(f'{folder} has no folder of a run, named by its time such as '
                          f'20261123_141116, with a log in it; expected the work dir of a '
                          f'training or test')
    runs: List[Run] = []
    for start in starts:
        joins = runs and (not start.trains or (start.begin > 0 and runs[-1].last.trains))
        if joins:
            runs[-1].starts.append(start)
        else:
            runs.append(Run(folder.resolve().name, folder, [start]))
    for run in runs[:-1]:
        run.name, run.is_last = f'{run.name}/{run.starts[0].folder.name}', False
    return runs


def find_run(path: Union[str, Path]) -> Tuple[Run, Optional[Run]]:
    """Return a run and the run before it in its folder.

    Args:
        path: Work dir, for its last run; or the folder of one start in it, ``WORK_DIR/TIMESTAMP``.

    Raises:
        ReportError: If there is none.
    """
    path = Path(path)
    if _STAMP.match(path.name) and path.is_dir():
        runs = read_runs(path.parent)
        index = next((index for index, run in enumerate(runs)
                      if any(each.folder.name == path.name for each in run.starts)), None)
        if index is None:
            raise ReportError(f'{path} holds no log of a run, expected a folder of one start')
    else:
        runs = read_runs(path)
        index = len(runs) - 1
    return runs[index], runs[index - 1] if index else None


def _read_start(folder: Path) -> Start:
    record, log = read_record(folder), read_log(folder)
    rows = _read_scalars(folder)
    evaluations = [_evaluation(each) for each in record.get('evaluations') or []]
    from_log = [Evaluation(each.phase, each.iteration, each.metrics,
                           [ClassTable('', names, columns) for names, columns in each.tables])
                for each in log.evaluations]
    if not record:
        evaluations = from_log
    elif len(from_log) == len(evaluations):
        for mine, logged in zip(evaluations, from_log):  # such as MMSegmentation's IoUMetric
            mine.tables = mine.tables or logged.tables
    return Start(folder, record, log, rows, evaluations)


def _evaluation(stored: Dict[str, Any]) -> Evaluation:
    numbers = {name: finite(value) for name, value in (stored.get('metrics') or {}).items()}
    return Evaluation(
        str(stored.get('phase', 'val')), int(stored.get('iteration') or 0),
        {name: value for name, value in numbers.items() if value is not None},
        [ClassTable(str(each['name']), [str(name) for name in each['classes']], each['columns'],
                    each.get('matrix')) for each in stored.get('tables') or []])


def _read_scalars(folder: Path) -> List[Dict[str, Any]]:
    """Return the lines of LocalVisBackend that training wrote; those of evaluations are elsewhere.

    A line that a kill left incomplete is left out.
    """
    for path in (folder / 'vis_data' / 'scalars.json',
                 folder / 'vis_data' / f'{folder.name}.json'):
        if path.is_file():
            break
    else:
        return []
    rows = []
    for line in path.read_text(encoding='utf-8', errors='replace').splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        # MMEngine's lines of an evaluation have times too, and no 'iter'.
        if isinstance(row, dict) and finite(row.get('step')) is not None \
                and ('iter' in row or 'data_time' not in row):
            rows.append(row)
    return rows


def _step(row: Dict[str, Any]) -> float:
    return float(row['step'])
