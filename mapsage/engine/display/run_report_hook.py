"""Records what a run did and scored, and writes its report when it ends.

The hook writes only what other hooks do not write: scores by class, the confusion matrix, the end
of the run. `mapsage/pictures/report` makes the page from that and from the other files in the work dir. A
failure to write a report must never end a run, so every step here is guarded.
"""

from __future__ import annotations

import logging
import os
import shlex
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

import numpy as np
from mmengine.dist import get_world_size, is_main_process
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS
from mmengine.runner import BaseLoop
from mmseg.evaluation import IoUMetric

from mapsage.accelerator import current_accelerator
from mapsage.distributed import error_text
from mapsage.engine.checkpoints.writer_lease import SupersededError, check_writer
from mapsage.engine.guards.reproducibility import ReproducibilityHook
from mapsage.evaluation import scores
from mapsage.host.hook import MapSageHook
from mapsage.host.runner import HostRunner, MapSageRun, confusion_matrix, hooks_of_type, metrics_of
from mapsage.pictures.report import write_report
from mapsage.pictures.report.record import flat_config, percentages, write_record
from mapsage.pictures.report.runs import ClassTable, mean_note
from mapsage.version import __version__
from mapsage_launcher.shipped import program
from mapsage_launcher.stop_request import StoppedEarly


@HOOKS.register_module()
class RunReportHook(MapSageHook):
    """Hook that writes ``report.html`` into the work dir of a training or test.

    It is one file with curves, scores by class and their change since the previous run, confusion
    matrix, preview, maps, sampling, config and devices. It is written when the run ends, and before
    that at its start and after each evaluation, since a rank that fails may take rank 0 with it.
    ``tools/report.py`` writes it again. ``run.json``, in the folder of the log, has what the report
    needs and no other hook writes: scores by class, the last confusion matrix of a
    ConfusionMatrixMetric, how the run ended, and what it ran on.

    Only the main process works, without collectives. If the report or the file cannot be written,
    a warning says so and the run continues.

    ``MapSageRunner`` registers it, and calls :meth:`end_run`.
    """

    # Run after all other hooks, because the report reads the files that they write.
    priority = 'LOWEST'

    def __init__(self) -> None:
        self._record: Dict[str, Any] = {}

    def before_train(self, runner: HostRunner) -> None:
        """Record config, devices and the iteration at which the training begins."""
        self._run_guarded(runner, lambda: self._begin(runner, 'train'))
        self._run_guarded(runner, lambda: _write_page(runner, brief=True))

    def before_test(self, runner: HostRunner) -> None:
        """Record config and devices, unless this follows a training."""
        if not self._record:
            self._run_guarded(runner, lambda: self._begin(runner, 'test'))

    def before_val_epoch(self, runner: HostRunner) -> None:
        """Prepare to record the scores by class of MMSegmentation's metric."""
        self._run_guarded(runner, lambda: _record_areas(runner.val_loop))

    def before_test_epoch(self, runner: HostRunner) -> None:
        """Prepare to record the scores by class of MMSegmentation's metric."""
        self._run_guarded(runner, lambda: _record_areas(runner.test_loop))

    def after_val_epoch(
        self, runner: HostRunner, metrics: Optional[Dict[str, float]] = None
    ) -> None:
        """Record the figures of a validation."""
        self._run_guarded(
            runner, lambda: self._add_evaluation(runner, 'val', runner.val_loop, metrics)
        )

    def after_test_epoch(
        self, runner: HostRunner, metrics: Optional[Dict[str, float]] = None
    ) -> None:
        """Record the figures of a test."""
        self._run_guarded(
            runner, lambda: self._add_evaluation(runner, 'test', runner.test_loop, metrics)
        )

    def end_run(self, runner: MapSageRun, error: Optional[BaseException]) -> None:
        """Record how the run ended and write the report.

        Args:
            runner: Runner of the training or test.
            error: Error that ended the run; None if it is complete.
        """
        if self._record and not isinstance(error, SupersededError):
            self._run_guarded(runner, lambda: self._finish(runner, error))

    def _run_guarded(self, runner: HostRunner, action: Callable[[], object]) -> None:
        """Run an action on the main process; log its error instead of raising it."""
        if not is_main_process():
            return
        try:
            action()
        except Exception as failure:  # whatever files, users' evaluators or drawing raise
            runner.logger.warning(f'report: {error_text(failure)}')

    def _begin(self, runner: HostRunner, kind: str) -> None:
        cfg = runner.cfg
        resumed = kind == 'train' and bool(runner._resume and runner._load_from)
        self._record = dict(
            mapsage=__version__,
            kind=kind,
            status='running',
            started=time.time(),
            config=os.path.basename(cfg.filename or '') or runner.experiment_name,
            flat_config=flat_config(cfg.to_dict()),
            world_size=get_world_size(),
            accelerator=current_accelerator().describe(),
            evaluations=[],
            groups=next((hook.now for hook in hooks_of_type(runner, ReproducibilityHook)), []),
        )
        if isinstance(runner, MapSageRun):
            self._record['strategy'] = f'{runner.strategy.name}: {runner.strategy.reason}'
        if kind == 'train':
            self._record.update(
                begin_iter=runner.iter,
                max_iters=runner.max_iters,
                resumed_from=str(runner._load_from) if resumed else '',
            )
        else:
            self._record['checkpoint'] = str(runner._load_from or '')
        self._write_record(runner)

    def _add_evaluation(
        self,
        runner: HostRunner,
        phase: str,
        loop: Optional[BaseLoop],
        metrics: Optional[Dict[str, float]],
    ) -> None:
        # A user may call runner.val() without a training.
        if not self._record:
            self._begin(runner, 'test')
        if self._record['kind'] == 'test':
            phase = 'test'
        # Only the last matrix of a phase is stored: with 150 classes it has 100 kB.
        for earlier in self._record['evaluations']:
            if earlier['phase'] == phase:
                for table in earlier['tables']:
                    table.pop('matrix', None)
        tables = _class_tables(loop)
        self._record['evaluations'].append(
            dict(
                phase=phase,
                iteration=_iteration(runner) if phase == 'val' else 0,
                metrics=dict(metrics or {}),
                tables=tables,
            )
        )
        for table in tables:
            note = mean_note(ClassTable(**table))
            if note:
                runner.logger.warning(f'{phase}: {note}')
        self._write_record(runner)
        _write_page(runner, brief=True)

    def _finish(self, runner: HostRunner, error: Optional[BaseException]) -> None:
        if self._record['kind'] == 'test' or 'ended' not in self._record:
            self._record.update(
                status=_status(error),
                ended=time.time(),
                end_iter=_iteration(runner),
                error='' if error is None or isinstance(error, SystemExit) else error_text(error),
                peak_memory=current_accelerator().max_memory_allocated(),
            )
        self._write_record(runner)
        path = _write_page(runner)
        if _has_its_log(runner):
            runner.logger.info(f'report: {path}')
            for line in _closing_lines(runner, self._record):
                runner.logger.info(line)

    def _write_record(self, runner: HostRunner) -> None:
        self._record['written'] = time.time()
        write_record(Path(runner._log_dir), self._record)


def _write_page(runner: HostRunner, brief: bool = False) -> Path:
    """Write the page, unless another process has become the writer of the work dir."""
    check_writer()
    return write_report(runner.work_dir, brief=brief)


def _iteration(runner: HostRunner) -> int:
    """Return the number of finished steps."""
    # runner.iter would build the training's loop in a test.
    loop = runner._train_loop
    return int(loop.iter) if isinstance(loop, BaseLoop) else 0


def _has_its_log(runner: HostRunner) -> bool:
    """Return whether the log files exist. LoggerHook may have moved them to another folder."""
    # Another line would create a moved file again.
    paths = [
        handler.baseFilename
        for handler in runner.logger.handlers
        if isinstance(handler, logging.FileHandler)
    ]
    return all(map(os.path.exists, paths))


def _closing_lines(runner: HostRunner, record: Dict[str, Any]) -> Iterator[str]:
    """Yield the score and the next command of a training that has finished."""
    evaluations = [found for found in record['evaluations'] if found['phase'] == 'val']
    if record['kind'] != 'train' or record['status'] != 'finished' or not evaluations:
        return
    saving = next(iter(hooks_of_type(runner, CheckpointHook)), None)
    best = getattr(saving, 'best_ckpt_path', None)
    last = evaluations[-1]
    scores = ', '.join(f'{name} {value:.4g}' for name, value in last['metrics'].items())
    yield f'score: {scores} after {last["iteration"]:,} steps'
    checkpoint = best or getattr(saving, 'last_ckpt', None)
    if checkpoint and runner.cfg.filename:
        yield (
            f'next: {program("test")} {_shorter(runner.cfg.filename)} {_shorter(checkpoint)}'
            + (' (the best checkpoint)' if best else '')
        )


def _shorter(path: str) -> str:
    """Return a path as an argument for a shell, relative if it lies below the current folder."""
    relative = os.path.relpath(path)
    return shlex.quote(path if relative.startswith('..') else relative)


def _status(error: Optional[BaseException]) -> str:
    if error is None:
        return 'finished'
    if isinstance(error, StoppedEarly):
        return 'stopped'
    return 'interrupted' if isinstance(error, KeyboardInterrupt) else 'failed'


class _AreaRecorder:
    """Computes an ``IoUMetric`` and stores the areas by class, which MMSegmentation only prints.

    Args:
        metric: The metric, whose ``compute_metrics`` this object replaces.

    Attributes:
        areas: Pixels of each class in prediction and label, in either, in the prediction, and in
            the label, float64 (4, classes); None before the first evaluation.
    """

    def __init__(self, metric: IoUMetric) -> None:
        self._compute = metric.compute_metrics
        self.areas: Optional[np.ndarray] = None

    def __call__(self, results: List[Any]) -> Dict[str, float]:
        self.areas = None
        # With format_only there are no results.
        if results:
            self.areas = np.stack([np.asarray(sum(areas), np.float64) for areas in zip(*results)])
        return self._compute(results)


def _record_areas(loop: Optional[BaseLoop]) -> None:
    for metric in metrics_of(loop):
        # A subclass with other results has its own way to show them.
        if (
            isinstance(metric, IoUMetric)
            and type(metric).process is IoUMetric.process
            and not isinstance(metric.compute_metrics, _AreaRecorder)
        ):
            metric.compute_metrics = _AreaRecorder(metric)  # type: ignore[method-assign]


def _class_tables(loop: Optional[BaseLoop]) -> List[Dict[str, Any]]:
    """Return the figures by class of each metric that has them, in percent."""
    tables = []
    for metric in metrics_of(loop):
        figures: Optional[Dict[str, Any]] = None
        matrix = confusion_matrix(metric)
        names = (metric.dataset_meta or {}).get('classes') or ()
        recorder = metric.compute_metrics
        if isinstance(recorder, _AreaRecorder) and recorder.areas is not None:
            both, either, predicted, labeled = recorder.areas
            # A class without pixels has no score, as in MMSegmentation's table.
            with np.errstate(divide='ignore', invalid='ignore'):
                figures = dict(IoU=both / either, Acc=both / labeled, Precision=both / predicted)
        elif matrix is not None and len(names) == len(matrix):
            figures = dict(scores(matrix), matrix=[list(map(int, row)) for row in matrix])
        if figures is not None and len(figures['IoU']) == len(names):
            tables.append(
                dict(
                    name=metric.prefix or '',
                    classes=list(map(str, names)),
                    columns={
                        name: percentages(figures[name]) for name in ('IoU', 'Acc', 'Precision')
                    },
                    matrix=figures.get('matrix'),
                )
            )
    return tables
