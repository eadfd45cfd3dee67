"""Checks of devices, weights and batches before a run and at an interval during it."""
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
from mapsage.distributed import error_text, local_rank, open_channel, raise_together
from mapsage.distributed.device_checks import (
    SELF_TEST_SECONDS,
    check_collectives,
    check_device,
    check_finite,
    check_placement,
    compare_batches,
    describe_batch,
    not_finite,
)
from mapsage.distributed.weights import (
    LARGEST_DRIFT,
    first_difference,
    largest_drift,
    total_digest,
    weight_digests,
    weight_samples,
)
from mapsage.errors import UserError
from mapsage.hooks.gradients.non_finite_loss_hook import NonFiniteLossHook
from mapsage.wrappers import whole_model


class DeviceCheckError(UserError, RuntimeError):
    """The device check found problems on at least one rank.

    Attributes:
        problems: Texts by rank that say what is wrong there and what to do.
        compared: Whether ranks differ, so that nobody knows which of them is wrong.
    """

    on_every_rank = True

    def __init__(self, when: str, problems: Dict[int, List[str]], compared: bool = False) -> None:
        self.problems, self.compared = problems, compared
        lines = [f'  rank {rank}: {text}' for rank in sorted(problems) for text in problems[rank]]
        super().__init__('\n'.join([f'the device check {when} failed:', *lines]))


@dataclass
class DeviceReport:
    """What one rank found in a check; it is sent as JSON.

    Attributes:
        host: Name of the machine.
        device: Device or devices of the rank.
        model: Model of the card; cards of one model round alike.
        tensors: Number of parameters and buffers.
        mebibytes: Their size.
        digest: Digest of the weights.
        batch: Descriptions of the parts of a batch, by name.
        problems: Texts that say what is wrong and what to do.
        raised: Whether the check itself raised an exception.
    """

    host: str = ''
    device: str = ''
    model: str = ''
    tensors: int = 0
    mebibytes: float = 0.0
    digest: str = ''
    batch: Dict[str, str] = field(default_factory=dict)
    problems: List[str] = field(default_factory=list)
    raised: bool = False


@HOOKS.register_module()
class DeviceCheckHook(Hook):
    """Check devices, weights and batches, and raise one error on every rank when they are wrong.

    Before a run every rank allocates and computes on its device, has every parameter and buffer
    there, holds the same weights as the others, and gets right answers from the collectives; rank 0
    logs the table. The first batch is compared across ranks: keys, dtypes, number of samples,
    shapes. Every ``interval`` iterations the weights must still be finite, equal and on their
    device. Buffers are compared before the run only, since each rank keeps its own batch
    statistics. Between checks the hook does nothing.

    Weights are equal bit for bit, unless the ranks have cards of different models: these may round
    the same step differently. The drift is then measured and logged, and an error only from
    ``LARGEST_DRIFT`` on.

    Whatever one rank finds or raises, all ranks raise.

    Args:
        interval: Number of iterations between two checks; 0 for no checks during the run.
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
        """Check before a validation without training. Collective."""
        self._check_run(runner, 'before validation')

    def before_test(self, runner: Runner) -> None:
        """Check before a test. Collective."""
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

        when = 'of the first batch'
        every = _gather(when, look)
        _raise_problems(when, [report.problems for report in every])
        _raise_problems(when, compare_batches([report.batch for report in every]), compared=True)
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
            report.model = current_accelerator().card_model(local_rank())
            report.problems = (check_placement(model, devices)
                               or check_finite(model, self._not_finite))
            if not report.problems:
                digests.update(weight_digests(model, buffers=False))
                report.digest = total_digest(digests)

        when = f'after iteration {runner.iter + 1}'
        with whole_model(runner.model):  # a head that is split over ranks can be compared
            every = _gather(when, look)
            if any(report.problems for report in every):
                _explain_bad_numbers(runner)
            _raise_problems(when, [report.problems for report in every])
            drifted = self._compare_rounded_weights(runner, model, every, when)
            if not drifted:
                _raise_problems(when, _compare_weights(every, digests), compared=True)

    @staticmethod
    def _compare_rounded_weights(runner: Runner, model: nn.Module,
                                 every: Sequence[DeviceReport], when: str) -> bool:
        """Return whether unequal weights are explained by cards that round differently.

        Collective where the weights differ and the models of the cards do, which all ranks see.
        """
        models = sorted({report.model for report in every})
        if len(models) < 2 or len({report.digest for report in every}) < 2:
            return False
        texts = open_channel().gather_texts(json.dumps(weight_samples(model)))
        name, rank, drift = largest_drift([json.loads(text) for text in texts])
        if drift >= LARGEST_DRIFT:
            return False
        runner.logger.warning(
            f'{when} the weights of the ranks differ by rounding: by up to {drift:.1e} of the size '
            f"of {name!r} (rank {rank} and rank 0). The ranks have {' and '.join(models)}, which "
            f'may round the same step differently; from {LARGEST_DRIFT:g} on it is an error.')
        return True

    def _check_run(self, runner: Runner, when: str) -> None:
        """Check everything but the batch, once."""
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
            report.model = accelerator.card_model(local_rank())
            tensors = list(model.parameters()) + list(model.buffers())
            report.tensors = len(tensors)
            report.mebibytes = sum(t.numel() * t.element_size() for t in tensors) / 2**20
            self._not_finite = not_finite(model)  # is not reported later
            broken = sorted(self._not_finite.intersection(dict(model.named_parameters())))
            if broken:
                report.problems.append(
                    f'parameter {broken[0]!r} (of {len(broken)}) holds NaN or infinity, expected '
                    f'finite numbers. Look at the checkpoint in load_from and at init_cfg.')
            digests.update(weight_digests(model))
            report.digest = total_digest(digests)

        every = _gather(when, look)
        compared = not any(report.problems for report in every)
        if compared:
            wrong = _gather(when, lambda report: report.problems.extend(
                check_collectives(accelerator, local_rank(), self.timeout).values()))
            for report, found in zip(every, wrong):
                report.problems += found.problems
        if not any(report.problems for report in every):
            for rank, problems in enumerate(_compare_weights(every, digests)):
                every[rank].problems += problems
        runner.logger.info(f'device check {when}\n{table(every)}')
        _raise_problems(when, [report.problems for report in every], compared)


def _explain_bad_numbers(runner: Runner) -> None:
    """Raise the error of the hook that knows where a NaN began. Collective.

    By now a NaN may have come to every rank with the averaged gradients.
    """
    for hook in runner.hooks:
        if isinstance(hook, NonFiniteLossHook):
            hook.gather_state(runner)


def table(reports: Sequence[DeviceReport]) -> str:
    """Return one line for each rank, for the log. Pure."""
    rows = [('rank', 'host', 'device', 'tensors', 'MiB', 'weights', 'result')]
    for rank, report in enumerate(reports):
        count = len(report.problems)
        rows.append((str(rank), report.host, report.device, str(report.tensors),
                     f'{report.mebibytes:.1f}', report.digest or '-',
                     f'{count} problem(s)' if count else 'good'))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return '\n'.join('  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
                     for row in rows)


def _gather(when: str, look: Callable[[DeviceReport], Any]) -> List[DeviceReport]:
    """Return every rank's report. Collective.

    Raises:
        DeviceCheckError: On every rank, if ``look`` raised on one of them.
    """
    report, error, text = DeviceReport(), None, ''
    try:
        look(report)
    except Exception as raised:  # becomes a DeviceCheckError on every rank
        error, report.raised = raised, True
        where = traceback.extract_tb(raised.__traceback__)[-1]
        text = (f'the check itself raised {error_text(raised)} '
                f'({where.filename}:{where.lineno}).')
    channel = open_channel()
    every = [DeviceReport(**json.loads(each))
             for each in channel.gather_texts(json.dumps(asdict(report)))]

    def make_error(texts: Dict[int, str]) -> DeviceCheckError:
        problems = {rank: each.problems + ([texts[rank]] if rank in texts else [])
                    for rank, each in zip(channel.ranks, every)}
        return DeviceCheckError(when, {rank: each for rank, each in problems.items() if each})

    if any(each.raised for each in every):
        raise_together(channel, error, f'the device check {when}', text=text, everywhere=make_error)
    return every


def _compare_weights(every: Sequence[DeviceReport], digests: Dict[str, int]) -> List[List[str]]:
    """Return each rank's problems. Collective where the totals differ, which all ranks see."""
    problems: List[List[str]] = [[] for _ in every]
    channel = open_channel()
    if len({report.digest for report in every}) > 1:
        name, odd, usual = first_difference(
            [json.loads(text) for text in channel.gather_texts(json.dumps(digests))])
        for rank in odd:
            problems[rank].append(
                f'{name!r} is not equal to that of rank {usual}. Change weights alike on every '
                f'rank, or not at all: look for hooks and model code that depend on the rank or '
                f'its data, and for parameters outside DDP.')
    return problems


def _raise_problems(when: str, problems: Sequence[Sequence[str]], compared: bool = False) -> None:
    if any(problems):
        raise DeviceCheckError(when, {rank: list(texts) for rank, texts in enumerate(problems)
                                      if texts}, compared)


def _unwrapped(runner: Runner) -> nn.Module:
    return runner.model.module if is_model_wrapper(runner.model) else runner.model


def _devices(runner: Runner) -> List[torch.device]:
    """Return the devices where tensors may be; a wrapper of several devices lists them."""
    return list(getattr(runner.model, 'devices', None) or
                [current_accelerator().device(local_rank())])
