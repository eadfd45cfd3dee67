"""What a terminal shows of a run's start: a few lines, while the log file keeps everything.

MMEngine prints its environment, the config one number a line and the order of all hooks before the
first loss, hundreds of lines. :class:`StartFilter` keeps them from the terminal until the first
step is logged. ``--verbose`` or ``log_level='DEBUG'`` shows them.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from typing import Any, Callable, Iterator, Optional, TextIO, Type, Union

import mmcv
import mmengine
import mmseg
import torch
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import BaseLoop, EpochBasedTrainLoop

from mapsage.engine.run_extension import EngineRun
from mapsage.host.runner import built_wrappers, plain_model

# LoggerHook's line of a step or an evaluation, with which the start ends.
_STEP_LINE = re.compile(r'(Iter|Epoch)\((train|val|test)\)')
# Lines that the host's packages log through print_log, which hides where they come from.
_HOST_LINES = re.compile(
    r'The prefix is not set in metric class|"FileClient" will be deprecated|"HardDiskBackend" is '
    r'the alias|Failed to (search|import)|Loads checkpoint by|The model and loaded state dict do '
    r'not match|Using env variable|Advance dataloader|per class results:'
)
# Warnings that the terminal shows before the first step. The summary takes the other lines.
_MOST_WARNINGS = 5
_FOLDERS = tuple(
    os.path.dirname(package.__file__ or '') + os.sep for package in (mmcv, mmengine, mmseg, torch)
)
_PRINT_LOG = os.path.join('mmengine', 'logging', 'logger.py')


class StartFilter(logging.Filter):
    """Hides the host's lines, tables and repeated warnings on a terminal until the first step.

    Errors always pass. Of MapSage's warnings the first few pass, then a line that there are more.

    Args:
        handler: Handler of the terminal.
    """

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__()
        self._handler = handler
        self._is_starting = True
        self._validates_first = False
        self._warnings = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the terminal shows a record."""
        text = record.getMessage()
        if not self._is_starting or record.levelno >= logging.ERROR:
            return True
        self._validates_first |= getattr(record, 'validates_first', False)
        step = _STEP_LINE.search(text)
        if step and step.group(2) == 'val' and self._validates_first:
            # A resumed run makes up for a validation. Its scores belong to the start, the progress not.
            return '  eta: ' not in text
        # A short test logs its scores before any step.
        if step or (text.startswith('per class results:') and not self._validates_first):
            self._is_starting = False
            return True
        is_host = record.pathname.startswith(_FOLDERS) and not record.pathname.endswith(_PRINT_LOG)
        if is_host or getattr(record, 'for_file', False) or _HOST_LINES.search(text):
            return False
        if record.levelno >= logging.WARNING:
            self._warnings += 1
            if self._warnings == _MOST_WARNINGS + 1:
                # A record of its own, because the log file gets this one unchanged.
                text = 'more warnings are in the log file.'
                self._handler.emit(logging.makeLogRecord(dict(vars(record), msg=text, args=None)))
            return self._warnings <= _MOST_WARNINGS
        return '\n' not in text.strip()


def quiet_start(logger: logging.Logger, level: Union[int, str]) -> None:
    """Let the terminal of a run show only the essence of its start.

    Warnings of the host's packages and of torch go to the log file until the process ends.

    Args:
        logger: Logger of the run.
        level: ``log_level`` of the config. With DEBUG the terminal shows everything.
    """
    if level in ('DEBUG', 'NOTSET', logging.DEBUG, logging.NOTSET):
        return
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler) and not isinstance(
            handler, logging.FileHandler
        ):
            handler.addFilter(StartFilter(handler))
    if not isinstance(warnings.showwarning, _HostWarnings):
        warnings.showwarning = _HostWarnings(warnings.showwarning)  # type: ignore[assignment]
    warnings.showwarning.logger = logger  # type: ignore[attr-defined]


class _HostWarnings:
    """Replaces ``warnings.showwarning``: warnings of the host's packages go to the log file.

    Args:
        show: The function that shows other warnings.

    Attributes:
        logger: Logger of the latest run.
    """

    def __init__(self, show: Callable[..., Any]) -> None:
        self._show = show
        self.logger: Optional[logging.Logger] = None

    def __call__(
        self,
        message: Union[Warning, str],
        category: Type[Warning],
        filename: str,
        lineno: int,
        file: Optional[TextIO] = None,
        line: Optional[str] = None,
    ) -> None:
        """Log or show a warning."""
        if self.logger is None or file is not None or not filename.startswith(_FOLDERS):
            self._show(message, category, filename, lineno, file, line)
            return
        self.logger.warning(
            f'{category.__name__}: {message} ({filename}:{lineno})', extra=dict(for_file=True)
        )


def summary_lines(run: EngineRun) -> Iterator[str]:
    """Yield a line on the model, on batches and schedule of a training, and on the run's folder."""
    model = plain_model(run)
    parts = ', '.join(
        type(module).__name__
        for name, module in model.named_children()
        if name in ('backbone', 'neck', 'decode_head')
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    weights = f'continued from {run._load_from}' if run._resume else f'weights of {run._load_from}'
    yield (
        f'model: {type(model).__name__} ({parts}), {count / 1e6:.3g} million parameters, '
        f'{weights if run._load_from else "no load_from"}'
    )
    if isinstance(run._train_loop, BaseLoop) and isinstance(
        run.optim_wrapper, (OptimWrapper, OptimWrapperDict)
    ):
        batch = getattr(run._train_loop.dataloader, 'batch_size', None) or 'its own number of'
        optimizers = [wrapper.optimizer for wrapper in built_wrappers(run.optim_wrapper)]
        names = sorted({type(optimizer).__name__ for optimizer in optimizers})
        # The rate of the config: the parameter groups already have the first one of a warm-up.
        rate = max((optimizer.defaults.get('lr', 0.0) for optimizer in optimizers), default=0.0)
        unit = 'epoch(s)' if isinstance(run._train_loop, EpochBasedTrainLoop) else 'step(s)'
        interval = getattr(run._train_loop, 'val_interval', None)
        yield (
            f'training: {run.max_iters:,} steps of {batch} images for each of '
            f'{run.virtual_ranks.count} rank(s), {", ".join(names)} with lr {rate:.4g}'
            + (f', validation every {interval} {unit}' if run.cfg.get('val_dataloader') else '')
        )
    yield f'folder: {run.work_dir}, log in {run._log_dir}'
