"""A progress bar on a terminal; other outputs keep the plain lines.

The bar shares the terminal with the log, so lines of the log must be printed above it, and the
terminal must be restored however the run ends, also after Ctrl-C. :class:`_BarsBelowLog` does the
first, and :meth:`ProgressBarHook._guard` the second.
"""

from __future__ import annotations

import datetime
import functools
import logging
import re
import sys
from typing import Any, Callable, Dict, List, Optional, Sequence, TextIO, Tuple, TypeVar

from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import BaseLoop
from rich.progress import TaskID
from torch.utils.data import DataLoader

from mapsage.base.terminal_bars import TerminalBars, can_redraw
from mapsage.distributed.wrappers.rank_batches import Batch
from mapsage.host.runner import HostRunner

_T = TypeVar('_T')
# Beginning of LoggerHook's lines for single iterations and for a whole evaluation.
_ITERATION_LINE = re.compile(r'(Iter|Epoch)\((train|val|test)\)')


@HOOKS.register_module()
class ProgressBarHook(Hook):
    """Hook that shows a bar with iteration, eta, loss and learning rate on rank 0's terminal.

    While the bar is shown, LoggerHook's lines for single iterations go to the log file only, and
    every other line is printed above the bar. Without a terminal (a pipe, a log file, nohup) and on
    other ranks the hook does nothing, so that the plain lines stay as they are.

    The numbers come from the runner's message hub, into which MMEngine's hooks write them. The hook
    therefore never reads a tensor and never waits for the device.

    Args:
        refresh_interval: Shortest time between two drawings, in seconds.
        show_lr: Whether to show the learning rate.

    Raises:
        ValueError: If ``refresh_interval`` is negative.
    """

    # Before LoggerHook (BELOW_NORMAL), so that the filter is set when LoggerHook logs. After the
    # hooks that measure: RuntimeInfoHook, and IterTimerHook, which is NORMAL too but registered
    # first.
    priority = 'NORMAL'

    def __init__(self, refresh_interval: float = 0.2, show_lr: bool = True) -> None:
        if refresh_interval < 0:
            raise ValueError(f'refresh_interval={refresh_interval}, expected 0 or more seconds')
        self.refresh_interval = refresh_interval
        self.show_lr = show_lr
        self._bar: Optional[_BarsBelowLog] = None
        self._train: Optional[TaskID] = None
        self._evaluation: Optional[TaskID] = None
        self._loops_running = 0
        self._guarded: List[BaseLoop] = []

    def before_run(self, runner: HostRunner) -> None:
        """Make sure that the terminal is restored however the loop ends."""
        if not is_main_process() or not can_redraw(sys.stdout):
            return
        for loop in (runner._train_loop, runner._val_loop, runner._test_loop):
            # A loop that is not built yet is a dict.
            if isinstance(loop, BaseLoop):
                self._guard(loop)

    def before_train(self, runner: HostRunner) -> None:
        """Show the bar."""
        self._start(runner)
        self._train = self._draw(
            runner, lambda bar: bar.add(_train_label(runner), runner.max_iters, runner.iter)
        )

    def after_train_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Dict[str, Any]] = None,
    ) -> None:
        """Advance the bar by one iteration."""
        if self._bar is None or self._train is None:
            return
        done = runner.iter + 1
        if self._bar.due(self.refresh_interval) or done == runner.max_iters:
            self._show(runner, self._train, done, _train_label(runner), ('loss', 'lr'))

    def after_train(self, runner: HostRunner) -> None:
        """Remove the bar."""
        self._stop()

    def after_run(self, runner: HostRunner) -> None:
        """Remove the bar, also after a separate validation or test."""
        self._stop()

    def before_val_epoch(self, runner: HostRunner) -> None:
        """Show a second bar for the validation."""
        self._start_evaluation(runner, 'val', runner.val_dataloader)

    def before_test_epoch(self, runner: HostRunner) -> None:
        """Show a bar for the test."""
        self._start_evaluation(runner, 'test', runner.test_dataloader)

    def after_val_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Sequence[Any]] = None,
    ) -> None:
        """Advance the second bar."""
        self._evaluation_step(runner, 'val', batch_idx + 1, len(runner.val_dataloader))

    def after_test_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Sequence[Any]] = None,
    ) -> None:
        """Advance the bar."""
        self._evaluation_step(runner, 'test', batch_idx + 1, len(runner.test_dataloader))

    def after_val_epoch(
        self, runner: HostRunner, metrics: Optional[Dict[str, float]] = None
    ) -> None:
        """Remove the second bar, and show LoggerHook's line with the metrics on the terminal."""
        self._end_evaluation()

    def after_test_epoch(
        self, runner: HostRunner, metrics: Optional[Dict[str, float]] = None
    ) -> None:
        """Remove the bar, and show LoggerHook's line with the metrics on the terminal."""
        self._end_evaluation()

    def after_val(self, runner: HostRunner) -> None:
        """Hide the following lines of training iterations from the terminal again."""
        if self._bar is not None:
            self._bar.hides_iterations = True

    def _guard(self, loop: BaseLoop) -> None:
        """Make ``loop.run`` remove the bar when it ends with an exception or Ctrl-C.

        MMEngine calls no hook in this case, and the streams would stay redirected after the run.
        """
        if any(loop is guarded for guarded in self._guarded):
            return
        self._guarded.append(loop)
        run = loop.run

        @functools.wraps(run)
        def run_then_stop(*args: Any, **kwargs: Any) -> Any:
            # A validation runs inside the training loop and must not remove the training's bar.
            self._loops_running += 1
            try:
                return run(*args, **kwargs)
            finally:
                self._loops_running -= 1
                if self._loops_running == 0:
                    self._stop()

        loop.run = run_then_stop

    def _start(self, runner: HostRunner) -> None:
        if self._bar is not None or not is_main_process() or not can_redraw(sys.stdout):
            return
        try:
            self._bar = _BarsBelowLog(runner.logger)
        except OSError as error:
            self._continue_without(runner, error)

    def _stop(self) -> None:
        bar, self._bar = self._bar, None
        self._train = self._evaluation = None
        if bar is not None:
            bar.stop()

    def _start_evaluation(self, runner: HostRunner, mode: str, dataloader: DataLoader) -> None:
        self._start(runner)
        self._evaluation = self._draw(runner, lambda bar: bar.add(mode, len(dataloader), 0))

    def _evaluation_step(self, runner: HostRunner, mode: str, done: int, total: int) -> None:
        if self._bar is None or self._evaluation is None:
            return
        if self._bar.due(self.refresh_interval) or done == total:
            self._show(runner, self._evaluation, done, mode, ())

    def _end_evaluation(self) -> None:
        if self._bar is None or self._evaluation is None:
            return
        self._bar.hides_iterations = False
        if self._train is not None:
            self._bar.remove(self._evaluation)
        self._evaluation = None

    def _show(
        self, runner: HostRunner, task: TaskID, done: int, label: str, scalars: Sequence[str]
    ) -> None:
        shown = [name for name in scalars if name != 'lr' or self.show_lr]
        numbers = _format_numbers(runner, shown)
        self._draw(runner, lambda bar: bar.show(task, done, label, numbers))

    def _draw(self, runner: HostRunner, draw: Callable[[_BarsBelowLog], _T]) -> Optional[_T]:
        """Draw; continue without a bar if the terminal is gone, as after an SSH session closes."""
        if self._bar is None:
            return None
        try:
            return draw(self._bar)
        except OSError as error:
            self._continue_without(runner, error)
            return None

    def _continue_without(self, runner: HostRunner, error: OSError) -> None:
        self._stop()
        runner.logger.warning(
            'progress bar: the terminal cannot be written to; the run continues '
            f'without the bar: {error}'
        )


class _HideIterationLines(logging.Filter):
    """Hides LoggerHook's lines of single iterations on the terminal while the bar shows them."""

    def __init__(self, bar: _BarsBelowLog) -> None:
        super().__init__()
        self._bar = bar

    def filter(self, record: logging.LogRecord) -> bool:
        return not (self._bar.hides_iterations and _ITERATION_LINE.match(record.getMessage()))


class _BarsBelowLog(TerminalBars):
    """The bars of one run, and the redirection of the log around them.

    Attributes:
        hides_iterations: Whether the log's lines of single iterations stay off the terminal.
    """

    def __init__(self, logger: logging.Logger) -> None:
        terminal = sys.stdout
        super().__init__(terminal)
        self.hides_iterations = True
        self._filter = _HideIterationLines(self)
        self._handlers: List[Tuple[logging.StreamHandler, TextIO]] = []
        for handler in logger.handlers:
            if (
                isinstance(handler, logging.StreamHandler)
                and not isinstance(handler, logging.FileHandler)
                and handler.stream in (terminal, sys.__stdout__)
            ):
                self._handlers.append((handler, handler.stream))
                # Rich has replaced sys.stdout by a stream that prints above the bar.
                handler.setStream(sys.stdout)
                handler.addFilter(self._filter)

    def stop(self) -> None:
        """Restore the log, draw a last time and restore the streams."""
        for handler, stream in self._handlers:
            handler.removeFilter(self._filter)
            handler.setStream(stream)
        self._handlers = []
        super().stop()


def _train_label(runner: HostRunner) -> str:
    """Return 'epoch 3/20', or 'train' for loops that count iterations only."""
    if (runner.max_epochs or 1) > 1:
        return f'epoch {min(runner.epoch + 1, runner.max_epochs)}/{runner.max_epochs}'
    return 'train'


def _format_numbers(runner: HostRunner, scalars: Sequence[str]) -> str:
    """Return the message hub's numbers as text, such as 'eta 0:12:30  loss 0.4321  lr 1.0e-04'."""
    hub = runner.message_hub
    columns = []
    eta = hub.get_info('eta')
    if eta is not None:
        columns.append(f'eta {datetime.timedelta(seconds=int(eta))}')
    for name in scalars:
        history = hub.log_scalars.get(f'train/{name}')
        if history is not None:
            value = history.current()
            columns.append(f'{name} {value:.2e}' if name == 'lr' else f'{name} {value:.4f}')
    return '  '.join(columns)
