"""Devices, weights and batches are checked before a run, and at an interval during it."""
from __future__ import annotations

import json
import socket
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Dict, List, Optional, Sequence, Set

import torch
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import nn

from mapsage.accelerator import current_accelerator
from mapsage.distributed import local_rank, open_channel
from mapsage.distributed.device_checks import (
    SELF_TEST_SECONDS,
    card_identity,
    check_collectives,
    check_device,
    check_finite,
    check_placement,
    compare_batches,
    describe_batch,
    not_finite,
    shared_cards,
)
from mapsage.distributed.weights import first_difference, total_digest, weight_digests
from mapsage.wrappers import whole_model


class DeviceCheckError(RuntimeError):
    """Something is wrong with the devices, weights or batches of some rank.

    Attributes:
        problems: By rank, what is wrong there and what to do.
    """

    def __init__(self, when: str, problems: Dict[int, List[str]]) -> None:
        self.problems = problems
        lines = [f'  rank {rank}: {text}' for rank in sorted(problems) for text in problems[rank]]
        super().__init__('\n'.join([f'the device check {when} failed:', *lines]))


@dataclass
class DeviceReport:
    """What one rank found about itself; it travels as JSON."""

    host: str = ''
    device: str = ''
    card: Optional[str] = None
    tensors: int = 0
    mebibytes: float = 0.0
    digest: str = ''
    batch: Dict[str, str] = field(default_factory=dict)
    problems: List[str] = field(default_factory=list)


@HOOKS.register_module()
class DeviceCheckHook(Hook):
    """Check devices, weights and batches, and raise one error on every rank when they are wrong.

    Before a run every rank allocates and computes on its device, has every parameter and buffer
    there, holds the same weights as the others, shares its card with no rank of its host, and gets
    right answers from the collectives; rank 0 logs the table. The first batch is compared across
    ranks: keys, dtypes, number of samples, shapes. Every ``interval`` iterations the weights must
    still be finite, equal and in place. Buffers are compared before the run only, since ranks
    keep batch statistics of their own. Between checks nothing is done.

    What one rank finds or raises is gathered, and all ranks raise it.

    Args:
        interval: Iterations between two checks; 0 for none during the run.
        timeout: Seconds that the self-test of the collectives may take.

    Raises:
        ValueError: If ``interval`` is negative or ``timeout`` not positive.
    """

    # After the hooks that may change a batch or the weights, before CheckpointHook (VERY_LOW).
    priority = 'LOW'

    def __init__(self, interval: int = 1000, timeout: float = SELF_TEST_SECONDS) -> None:
        if interval < 0:
            raise ValueError(f'interval={interval}, expected 0 or more iterations')
        if not timeout > 0:
            raise ValueError(f'timeout={timeout}, expected a positive number of seconds')
        self.interval, self.timeout = interval, timeout
        self._not_finite: Set[str] = set()
        self._checked = self._batch_checked = False

    def before_train(self, runner: Runner) -> None:
        """Check everything but the batch. Collective.

        Raises:
            DeviceCheckError: On every rank.
        """
        self._check_run(runner, 'before training')

    def before_val(self, runner: Runner) -> None:
        """Check a validation of its own. Collective."""
        self._check_run(runner, 'before validation')

    def before_test(self, runner: Runner) -> None:
        """Check a test. Collective."""
        self._check_run(runner, 'before testing')

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Compare the first batch across ranks. Collective, once.

        Raises:
            DeviceCheckError: On every rank.
        """
        if self._batch_checked:
            return
        self._batch_checked = True
        preprocessor = getattr(_unwrapped(runner), 'data_preprocessor', None)

        uneven = any(getattr(hook, 'uneven_batches', False) for hook in runner.hooks)

        def look(report: DeviceReport) -> None:
            report.batch = describe_batch(data_batch, getattr(preprocessor, 'size', None), uneven)

        when, every = 'of the first batch', _gather(look)
        _raise_problems(when, [report.problems for report in every])
        _raise_problems(when, compare_batches([report.batch for report in every]))
        if len(every) > 1:
            runner.logger.info(f'the first batch is alike on {len(every)} ranks: ' + '; '.join(
                f'{name} {text}' for name, text in every[0].batch.items()))

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None,
                         outputs: Optional[Dict[str, Any]] = None) -> None:
        """Check the weights, every ``interval`` iterations. Collective then.

        Raises:
            DeviceCheckError: On every rank.
        """
        if not self.interval or (runner.iter + 1) % self.interval:
            return
        model, devices = _unwrapped(runner), _devices(runner)
        digests: Dict[str, int] = {}

        def look(report: DeviceReport) -> None:
            report.problems = (check_placement(model, devices)
                               or check_finite(model, self._not_finite))
            if not report.problems:
                digests.update(weight_digests(model, buffers=False))
                report.digest = total_digest(digests)

        when = f'after iteration {runner.iter + 1}'
        with whole_model(runner.model):  # a head that is split over ranks can be compared
            every = _gather(look)
            _raise_problems(when, [report.problems for report in every])
            _raise_problems(when, _compare_weights(every, digests))

    def _check_run(self, runner: Runner, when: str) -> None:
        """Check all that needs no batch, once."""
        if self._checked:
            return
        self._checked = True
        accelerator, model, devices = current_accelerator(), _unwrapped(runner), _devices(runner)
        digests: Dict[str, int] = {}

        def look(report: DeviceReport) -> None:
            report.host = socket.gethostname()
            report.device = ', '.join(map(str, devices))
            report.problems = (check_device(accelerator, local_rank())
                               or check_placement(model, devices))
            if report.problems:
                return
            report.card = card_identity(accelerator, local_rank())
            tensors = list(model.parameters()) + list(model.buffers())
            report.tensors = len(tensors)
            report.mebibytes = sum(t.numel() * t.element_size() for t in tensors) / 2**20
            # a mask may hold -inf by design; what is not finite now is not held against it later
            self._not_finite = not_finite(model)
            broken = sorted(self._not_finite.intersection(dict(model.named_parameters())))
            if broken:
                report.problems.append(
                    f'parameter {broken[0]!r} (of {len(broken)}) holds NaN or infinity, expected '
                    f'finite numbers. Look at the checkpoint in load_from and at init_cfg.')
            digests.update(weight_digests(model))
            report.digest = total_digest(digests)

        every = _gather(look)
        for rank, others in shared_cards([report.card for report in every]).items():
            every[rank].problems.append(
                f'device {every[rank].device} is also the card of rank(s) {others}. Give every '
                f'rank of a host a local rank of its own (LOCAL_RANK), one a card.')
        if not any(report.problems for report in every):
            wrong = _gather(lambda report: report.problems.extend(
                check_collectives(accelerator, local_rank(), self.timeout).values()))
            for report, found in zip(every, wrong):
                report.problems += found.problems
        if not any(report.problems for report in every):
            for rank, problems in enumerate(_compare_weights(every, digests)):
                every[rank].problems += problems
        runner.logger.info(f'device check {when}\n{table(every)}')
        _raise_problems(when, [report.problems for report in every])


def table(reports: Sequence[DeviceReport]) -> str:
    """Return one line a rank for the log. Pure."""
    rows = [('rank', 'host', 'device', 'tensors', 'MiB', 'weights', 'result')]
    for rank, report in enumerate(reports):
        count = len(report.problems)
        rows.append((str(rank), report.host, report.device, str(report.tensors),
                     f'{report.mebibytes:.1f}', report.digest or '-',
                     f'{count} problem(s)' if count else 'good'))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return '\n'.join('  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
                     for row in rows)


def _gather(look: Callable[[DeviceReport], Any]) -> List[DeviceReport]:
    """Return every rank's report. Collective; what ``look`` raises is one of its problems."""
    report = DeviceReport()
    try:
        look(report)
    except Exception as error:  # every rank raises it, as part of a DeviceCheckError
        where = traceback.extract_tb(error.__traceback__)[-1]
        report.problems.append(f'the check itself raised {type(error).__name__}: {error} '
                               f'({where.filename}:{where.lineno}).')
    channel, mine = open_channel(), json.dumps(asdict(report))
    return [DeviceReport(**json.loads(text))
            for text in ([mine] if channel is None else channel.gather_texts(mine))]


def _compare_weights(every: Sequence[DeviceReport], digests: Dict[str, int]) -> List[List[str]]:
    """Return each rank's problems. Collective where the totals differ, which all ranks see."""
    problems: List[List[str]] = [[] for _ in every]
    channel = open_channel()
    if channel is not None and len({report.digest for report in every}) > 1:
        name, odd = first_difference(
            [json.loads(text) for text in channel.gather_texts(json.dumps(digests))])
        for rank in odd:
            problems[rank].append(
                f'{name!r} is not equal to that of rank 0. Change weights alike on every rank, or '
                f'not at all: look for hooks and model code that depend on the rank or its data, '
                f'and for parameters outside DDP.')
    return problems


def _raise_problems(when: str, problems: Sequence[Sequence[str]]) -> None:
    if any(problems):
        raise DeviceCheckError(when, {rank: list(texts) for rank, texts in enumerate(problems)
                                      if texts})


def _unwrapped(runner: Runner) -> nn.Module:
    return runner.model.module if is_model_wrapper(runner.model) else runner.model


def _devices(runner: Runner) -> List[torch.device]:
    """Return where tensors may be: a wrapper that spans several devices says so itself."""
    return list(getattr(runner.model, 'devices', None) or
                [current_accelerator().device(local_rank())])
