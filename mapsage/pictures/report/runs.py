"""Runs of a work dir, read from the files that training and tests leave there.

Every start of a program has a folder ``WORK_DIR/TIMESTAMP``. A start that resumed continues the
run before it; any other training start is a new run. Facts come from ``run.json`` (`record.py`),
training curves from ``vis_data/scalars.json``. A folder that has only the latter, for example of a
run without the report hook, still gets its curves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from mapsage.base.files import parse_json

from .record import ReportError, config_of_file, finite, read_record

_STAMP = re.compile(r'\d{8}_\d{6}$')
_LOG_LINE = re.compile(r'(?:\d{4}/)?\d\d/\d\d \d\d:\d\d:\d\d - \S+ - \w+ - (.*)')
Points = List[Tuple[float, float]]
# These keys of a line of scalars count steps; the others are curves.
_COUNTERS = ('step', 'iter', 'epoch')


class ClassTable(NamedTuple):
    """Scores by class of one evaluator in one evaluation.

    Attributes:
        name: Prefix of the evaluator's metrics; often empty.
        classes: Names of the C classes.
        columns: Metric name -> percentages, each of length C; None if undefined.
        matrix: Confusion matrix ``(C, C)``, rows are the truth; None if it was not recorded.
    """

    name: str
    classes: Sequence[str]
    columns: Dict[str, Sequence[Optional[float]]]
    matrix: Optional[Sequence[Sequence[int]]] = None


def mean_note(table: ClassTable) -> str:
    """Return a sentence if classes of a table have no labeled pixel, so that means leave them out."""
    if table.matrix:
        labeled = [sum(row) > 0 for row in table.matrix]
    else:
        # An accuracy is undefined where no pixel has the label.
        labeled = [
            value is not None for value in table.columns.get('Acc', [0.0] * len(table.classes))
        ]
    absent = [name for name, is_labeled in zip(table.classes, labeled) if not is_labeled]
    if not absent:
        return ''
    return (
        f'Means are over {len(table.classes) - len(absent)} of {len(table.classes)} classes: no '
        f'scored pixel has the label {", ".join(absent)}. Add such labels to the scored data (with a '
        f'split: another seed or a larger share).'
    )


def not_comparable(tables: Sequence[ClassTable]) -> str:
    """Return a warning if the tables have different classes or labels; '' otherwise."""
    if len({tuple(table.classes) for table in tables}) > 1:
        return 'The runs have different classes, so their means are not comparable.'
    # The row sums of a confusion matrix are the label pixels of the classes.
    if len({tuple(sum(row) for row in table.matrix) for table in tables if table.matrix}) > 1:
        return 'The runs were scored on different labels: the validation sets are not the same.'
    return ''


@dataclass
class Evaluation:
    """One validation or test.

    Attributes:
        phase: ``'val'`` or ``'test'``.
        iteration: Optimizer steps before it; 0 for a test of a checkpoint.
        metrics: Metric name -> value.
        tables: Scores by class, one table for each evaluator that has them.
    """

    phase: str
    iteration: int
    metrics: Dict[str, float] = field(default_factory=dict)
    tables: List[ClassTable] = field(default_factory=list)


@dataclass
class Start:
    """One start of a program in a work dir.

    Attributes:
        folder: Folder named after the time of the start.
        record: Content of ``run.json``; empty without the file.
        scalars: Lines that LocalVisBackend wrote during training.
        evaluations: Validations and tests of this start.
    """

    folder: Path
    record: Dict[str, Any]
    scalars: List[Dict[str, Any]]
    evaluations: List[Evaluation]

    @property
    def trains(self) -> bool:
        """Whether the program trained, or was about to."""
        return bool(self.record.get('kind', 'train') == 'train')

    @property
    def begin(self) -> int:
        """Iteration of the checkpoint that was resumed; 0 for a fresh start."""
        return int(self.record.get('begin_iter', 0))

    @property
    def end(self) -> int:
        """Last recorded iteration."""
        return max(
            self.begin,
            int(self.record.get('end_iter') or 0),
            *(evaluation.iteration for evaluation in self.evaluations),
            *(int(_step(row)) for row in self.scalars),
        )

    @property
    def started(self) -> float:
        """Time of the start, seconds since 1970."""
        recorded = finite(self.record.get('started'))
        if recorded is not None:
            return recorded
        return datetime.strptime(self.folder.name, '%Y%m%d_%H%M%S').timestamp()

    @property
    def seconds(self) -> float:
        """Wall-clock time until the end, or until ``run.json`` was last written."""
        last = finite(self.record.get('ended')) or finite(self.record.get('written'))
        return max(0.0, (last or self.started) - self.started)

    @property
    def status(self) -> str:
        """How the program ended, as recorded: 'finished', 'failed', 'running', ..."""
        if not self.record:
            return 'not recorded'
        return str(self.record.get('status', 'running'))

    def config_report(self) -> str:
        """Return the settings that differ from the ``_base_`` files; '' if the log has none.

        The run logs them when it starts, and nowhere else.
        """
        report: List[str] = []
        try:
            with open(
                self.folder / f'{self.folder.name}.log', encoding='utf-8', errors='backslashreplace'
            ) as log:
                for line in log:
                    stamped = _LOG_LINE.match(line)
                    if report and stamped:
                        break
                    if report:
                        report.append(line.rstrip('\n'))
                    elif stamped and stamped.group(1).startswith('config: '):
                        report.append(stamped.group(1))
        except OSError:
            # There is no log, or LoggerHook(keep_local=False) moved it.
            return ''
        return '\n'.join(report)


@dataclass
class Run:
    """A training with the starts that continued it and their tests, or tests without a training.

    Attributes:
        name: Name of the work dir, with the time of the first start unless the run is the last one.
        work_dir: Work dir of the run.
        starts: Starts in order, at least one.
        is_last: Whether no later training began in the work dir. Only then do the preview, maps and
            sampling records there belong to this run.
    """

    name: str
    work_dir: Path
    starts: List[Start]
    is_last: bool = True

    @property
    def last(self) -> Start:
        """The last start that trained; without a training, the last start."""
        return ([start for start in self.starts if start.trains] or self.starts)[-1]

    @property
    def config_name(self) -> str:
        """Name of the config file, or of the experiment."""
        return str(self.last.record.get('config') or self.work_dir.name)

    @property
    def iterations(self) -> int:
        """Optimizer steps of the final weights."""
        return self.last.end

    @property
    def seconds(self) -> float:
        """Wall-clock time of all starts that trained."""
        return sum(start.seconds for start in self.starts if start.trains)

    def config(self) -> Dict[str, str]:
        """Return the config: dotted key -> value as text; empty if it was not recorded."""
        stored = self.last.record.get('flat_config')
        if isinstance(stored, dict) and stored:
            return {str(key): str(value) for key, value in stored.items()}
        return config_of_file(self.last.folder / 'vis_data' / 'config.py')

    def curves(self) -> Dict[str, Points]:
        """Return the scalars that were logged in training: key -> points (iteration, value)."""
        curves: Dict[str, Points] = {}
        for start in self.starts:
            if not start.trains:
                continue
            # The resumed start repeats the steps after its checkpoint.
            for points in curves.values():
                while points and points[-1][0] > start.begin:
                    points.pop()
            for row in start.scalars:
                for key, value in row.items():
                    number = finite(value)
                    if key not in _COUNTERS and number is not None:
                        curves.setdefault(key, []).append((_step(row), number))
        return {key: points for key, points in curves.items() if points}

    def evaluations(self, phase: str = 'val') -> List[Evaluation]:
        """Return the validations or tests in order.

        Validations after the checkpoint that a later start resumed are left out: their weights
        were lost. So is the validation of that checkpoint if the later start repeats it.
        """
        evaluations: List[Evaluation] = []
        for start in self.starts:
            if start.trains and phase == 'val':
                while evaluations and evaluations[-1].iteration > start.begin:
                    evaluations.pop()
            added = [evaluation for evaluation in start.evaluations if evaluation.phase == phase]
            if (
                phase == 'val'
                and added
                and evaluations
                and evaluations[-1].iteration == added[0].iteration
            ):
                evaluations.pop()
            evaluations += added
        return evaluations

    def final(self) -> Optional[Evaluation]:
        """Return the last validation; without a validation, the last test."""
        evaluations = self.evaluations() or self.evaluations('test')
        return evaluations[-1] if evaluations else None

    def score(self) -> Tuple[str, Points]:
        """Return the name and the points (iteration, value) of the main metric: mIoU if present."""
        evaluations = self.evaluations() or self.evaluations('test')
        names = [name for evaluation in evaluations for name in evaluation.metrics]
        main = next(
            (name for name in names if name.split('/')[-1] == 'mIoU'), names[0] if names else ''
        )
        return main, [
            (evaluation.iteration, evaluation.metrics[main])
            for evaluation in evaluations
            if main in evaluation.metrics
        ]


def read_runs(work_dir: Union[str, Path]) -> List[Run]:
    """Read the runs of a work dir, the oldest first.

    Raises:
        ReportError: If the folder does not exist or contains no run.
    """
    folder = Path(work_dir)
    if not folder.is_dir():
        raise ReportError(f'the folder {folder} does not exist, expected the work dir of a run')
    starts = [
        _read_start(path)
        for path in sorted(folder.iterdir())
        if _STAMP.match(path.name) and path.is_dir()
    ]
    starts = [start for start in starts if start.record or start.scalars]
    if not starts:
        raise ReportError(
            f'{folder} has no folder of a run, named by its time such as '
            f'20261123_141116, with a run.json or scalars in it; expected the work '
            f'dir of a training or test'
        )
    runs: List[Run] = []
    for start in starts:
        continues = runs and (not start.trains or (start.begin > 0 and runs[-1].last.trains))
        if continues:
            runs[-1].starts.append(start)
        else:
            runs.append(Run(folder.resolve().name, folder, [start]))
    for run in runs[:-1]:
        run.name, run.is_last = f'{run.name}/{run.starts[0].folder.name}', False
    return runs


def find_run(path: Union[str, Path]) -> Tuple[Run, Optional[Run]]:
    """Return a run and the previous run in the same work dir.

    Args:
        path: Work dir, for its last run; or the folder of one start, ``WORK_DIR/TIMESTAMP``.

    Raises:
        ReportError: If there is no run.
    """
    path = Path(path)
    if _STAMP.match(path.name) and path.is_dir():
        runs = read_runs(path.parent)
        index = next(
            (
                index
                for index, run in enumerate(runs)
                if any(start.folder.name == path.name for start in run.starts)
            ),
            None,
        )
        if index is None:
            raise ReportError(
                f'{path} has no run.json and no scalars, expected the folder of one start'
            )
    else:
        runs = read_runs(path)
        index = len(runs) - 1
    return runs[index], runs[index - 1] if index else None


def _read_start(folder: Path) -> Start:
    record = read_record(folder)
    evaluations = [_parse_evaluation(stored) for stored in record.get('evaluations') or []]
    return Start(folder, record, _read_scalars(folder), evaluations)


def _parse_evaluation(stored: Dict[str, Any]) -> Evaluation:
    values = {name: finite(value) for name, value in (stored.get('metrics') or {}).items()}
    return Evaluation(
        str(stored.get('phase', 'val')),
        int(stored.get('iteration') or 0),
        {name: value for name, value in values.items() if value is not None},
        [
            ClassTable(
                str(table['name']),
                [str(name) for name in table['classes']],
                table['columns'],
                table.get('matrix'),
            )
            for table in stored.get('tables') or []
        ],
    )


def _read_scalars(folder: Path) -> List[Dict[str, Any]]:
    """Return the training lines of LocalVisBackend, without the lines of evaluations.

    A line that is incomplete because the process was killed is left out.
    """
    for path in (folder / 'vis_data' / 'scalars.json', folder / 'vis_data' / f'{folder.name}.json'):
        if path.is_file():
            break
    else:
        return []
    rows = []
    for line in path.read_text(encoding='utf-8', errors='replace').splitlines():
        try:
            row = parse_json(line)
        except ValueError:
            continue
        # MMEngine's lines of an evaluation have data_time too, but no 'iter'.
        if (
            isinstance(row, dict)
            and finite(row.get('step')) is not None
            and ('iter' in row or 'data_time' not in row)
        ):
            rows.append(row)
    return rows


def _step(row: Dict[str, Any]) -> float:
    return float(row['step'])
