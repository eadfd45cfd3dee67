"""Checks of devices, weights and batches before a run and at an interval during it.

A check has two stages: each rank fills a :class:`DeviceReport`, and the ranks gather all reports,
so every rank raises the same error. What differs between ranks can only be found after that. The
checks of one rank are in `mapsage/distributed/device_checks.py`.
"""

from __future__ import annotations

import json
import socket
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Dict, List, Optional, Sequence, Set

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch import nn

from mapsage.accelerator import current_accelerator
from mapsage.base.errors import UserError
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
from mapsage.distributed.wrappers import MMModelParallel
from mapsage.distributed.wrappers.rank_batches import Batch
from mapsage.distributed.wrappers.split_model import whole_model
from mapsage.engine.guards.non_finite_loss_hook import NonFiniteLossHook
from mapsage.engine.loading.loader_workers import LoaderWorkerError
from mapsage.host.hook import mapsage_hooks
from mapsage.host.runner import HostRunner, hooks_of_type, plain_model
from mapsage.host.segmentors import padded_size


class DeviceCheckError(UserError, RuntimeError):
    """The device check found problems on at least one rank.

    Attributes:
        check: Name of the check, for the message.
        problems: Texts by rank that say what is wrong there and what to do.
        compared: Whether ranks differ, so that nobody knows which of them is wrong.
        suspects_all: Whether each rank that is named may be the wrong one, on whichever machine.
    """

    on_every_rank = True
    check = 'device check'
    suspects_all = False

    def __init__(self, when: str, problems: Dict[int, List[str]], compared: bool = False) -> None:
        self.problems, self.compared = problems, compared
        lines = [f'  rank {rank}: {text}' for rank in sorted(problems) for text in problems[rank]]
        super().__init__('\n'.join([f'the {self.check} {when} failed:', *lines]))


@dataclass
class DeviceReport:
    """Findings of one rank in a check; sent as JSON.

    Attributes:
        host: Name of the machine.
        device: Device or devices of the rank.
        model: Model of the card; cards of one model round alike.
        tensors: Number of parameters and buffers.
        mebibytes: Size of the parameters and buffers.
        digest: Digest of the weights.
        batch: Descriptions of the entries of a batch, by name.
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
    the same step differently. The drift is then measured and logged, and is an error only from
    ``LARGEST_DRIFT`` on.

    A problem or an exception on one rank is raised on all ranks.

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
        # Names of the tensors that were not finite before the run, which is not reported later.
        self._not_finite: Set[str] = set()
        self._checked = self._batch_checked = False

    def before_train(self, runner: HostRunner) -> None:
        """Check everything but the batch. Collective.

        Raises:
            DeviceCheckError: On every rank.
        """
        self._check_run(runner, 'before training')

    def before_val(self, runner: HostRunner) -> None:
        """Check before a validation without training. Collective."""
        self._check_run(runner, 'before validation')

    def before_test(self, runner: HostRunner) -> None:
        """Check before a test. Collective."""
        self._check_run(runner, 'before testing')

    def before_train_iter(
        self, runner: HostRunner, batch_idx: int, data_batch: Optional[Batch] = None
    ) -> None:
        """Compare the first batch across ranks. Collective, once.

        Raises:
            DeviceCheckError: On every rank.
        """
        if self._batch_checked:
            return
        self._batch_checked = True
        size = padded_size(plain_model(runner))
        uneven = any(hook.uneven_batches for hook in mapsage_hooks(runner.hooks))

        def describe(report: DeviceReport) -> None:
            report.batch = describe_batch(data_batch, size, uneven)

        when = 'of the first batch'
        reports = _gather(when, describe)
        _raise_problems(when, [report.problems for report in reports])
        _raise_problems(when, compare_batches([report.batch for report in reports]), compared=True)
        if len(reports) > 1:
            runner.logger.info(
                f'the first batch is alike on {len(reports)} ranks: '
                + '; '.join(f'{name} {text}' for name, text in reports[0].batch.items()),
                extra=dict(for_file=True),
            )

    def after_train_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Dict[str, Any]] = None,
    ) -> None:
        """Check the weights, every ``interval`` iterations. Collective then.

        Raises:
            DeviceCheckError: On every rank.
        """
        if not self.interval or (runner.iter + 1) % self.interval:
            return
        model, devices = plain_model(runner), _devices(runner)
        digests: Dict[str, int] = {}

        def check_weights(report: DeviceReport) -> None:
            report.model = current_accelerator().card_model(local_rank())
            report.problems = check_placement(model, devices) or check_finite(
                model, self._not_finite
            )
            if not report.problems:
                digests.update(weight_digests(model, buffers=False))
                report.digest = total_digest(digests)

        when = f'after iteration {runner.iter + 1}'
        # A head that is split over ranks can be compared only as a whole.
        with whole_model(runner.model):
            reports = _gather(when, check_weights)
            if any(report.problems for report in reports):
                _raise_first_nan(runner)
            _raise_problems(when, [report.problems for report in reports])
            if not self._explained_by_rounding(runner, model, reports, when):
                _raise_problems(when, _compare_weights(reports, digests), compared=True)

    @staticmethod
    def _explained_by_rounding(
        runner: HostRunner, model: nn.Module, reports: Sequence[DeviceReport], when: str
    ) -> bool:
        """Return whether unequal weights are explained by cards that round differently.

        Collective if the weights differ and the models of the cards do, which all ranks see.
        """
        models = sorted({report.model for report in reports})
        if len(models) < 2 or len({report.digest for report in reports}) < 2:
            return False
        texts = open_channel().gather_texts(json.dumps(weight_samples(model)))
        name, rank, drift = largest_drift([json.loads(text) for text in texts])
        if drift >= LARGEST_DRIFT:
            return False
        runner.logger.warning(
            f'{when} the weights of the ranks differ by rounding: by up to {drift:.1e} of the size '
            f'of {name!r} (rank {rank} and rank 0). The ranks have {" and ".join(models)}, which '
            f'may round the same step differently; from {LARGEST_DRIFT:g} on it is an error.'
        )
        return True

    def _check_run(self, runner: HostRunner, when: str) -> None:
        """Check everything but the batch, once."""
        if self._checked:
            return
        self._checked = True
        accelerator, model, devices = current_accelerator(), plain_model(runner), _devices(runner)
        digests: Dict[str, int] = {}

        def check_rank(report: DeviceReport) -> None:
            report.host = socket.gethostname()
            report.device = ', '.join(map(str, devices))
            report.problems = check_device(accelerator, local_rank()) or check_placement(
                model, devices
            )
            if report.problems:
                return
            report.model = accelerator.card_model(local_rank())
            tensors = list(model.parameters()) + list(model.buffers())
            report.tensors = len(tensors)
            report.mebibytes = sum(t.numel() * t.element_size() for t in tensors) / 2**20
            self._not_finite = not_finite(model)
            broken = sorted(self._not_finite.intersection(dict(model.named_parameters())))
            if broken:
                report.problems.append(
                    f'parameter {broken[0]!r} (of {len(broken)}) holds NaN or infinity, expected '
                    f'finite numbers. Look at the checkpoint in load_from and at init_cfg.'
                )
            digests.update(weight_digests(model))
            report.digest = total_digest(digests)

        reports = _gather(when, check_rank)
        compared = not any(report.problems for report in reports)
        if compared:
            tested = _gather(
                when,
                lambda report: report.problems.extend(
                    check_collectives(accelerator, local_rank(), self.timeout).values()
                ),
            )
            for report, test in zip(reports, tested):
                report.problems += test.problems
        if not any(report.problems for report in reports):
            for rank, problems in enumerate(_compare_weights(reports, digests)):
                reports[rank].problems += problems
        runner.logger.info(f'device check {when}\n{table(reports)}')
        _raise_problems(when, [report.problems for report in reports], compared)


def _raise_first_nan(runner: HostRunner) -> None:
    """Raise the error of the hook that knows where a NaN began. Collective.

    By now a NaN may have reached every rank with the averaged gradients.
    """
    for hook in hooks_of_type(runner, NonFiniteLossHook):
        hook.raise_together(runner)


def table(reports: Sequence[DeviceReport]) -> str:
    """Return one line for each rank, for the log. Pure."""
    rows = [('rank', 'host', 'device', 'tensors', 'MiB', 'weights', 'result')]
    for rank, report in enumerate(reports):
        count = len(report.problems)
        rows.append(
            (
                str(rank),
                report.host,
                report.device,
                str(report.tensors),
                f'{report.mebibytes:.1f}',
                report.digest or '-',
                f'{count} problem(s)' if count else 'good',
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    return '\n'.join(
        '  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )


def _gather(when: str, fill: Callable[[DeviceReport], Any]) -> List[DeviceReport]:
    """Return every rank's report. Collective.

    Args:
        when: Time of the check, for errors.
        fill: Function that writes the findings of this rank into its report.

    Raises:
        DeviceCheckError: On every rank, if ``fill`` raised on one of them.
    """
    report, error, text = DeviceReport(), None, ''
    try:
        fill(report)
    # A signal handler raises it wherever the rank is. The check has nothing to do with it.
    except LoaderWorkerError:
        raise
    except Exception as raised:  # becomes a DeviceCheckError on every rank
        error, report.raised = raised, True
        frame = traceback.extract_tb(raised.__traceback__)[-1]
        text = f'the check itself raised {error_text(raised)} ({frame.filename}:{frame.lineno}).'
    channel = open_channel()
    reports = [
        DeviceReport(**json.loads(row)) for row in channel.gather_texts(json.dumps(asdict(report)))
    ]

    def make_error(texts: Dict[int, str]) -> DeviceCheckError:
        problems = {
            rank: report.problems + ([texts[rank]] if rank in texts else [])
            for rank, report in zip(channel.ranks, reports)
        }
        return DeviceCheckError(
            when, {rank: rank_problems for rank, rank_problems in problems.items() if rank_problems}
        )

    if any(report.raised for report in reports):
        raise_together(channel, error, f'the device check {when}', text=text, everywhere=make_error)
    return reports


def _compare_weights(reports: Sequence[DeviceReport], digests: Dict[str, int]) -> List[List[str]]:
    """Return each rank's problems. Collective if the totals differ, which all ranks see.

    Args:
        reports: Reports of all ranks, with the total digests.
        digests: Digest of each tensor of this rank, by name.
    """
    problems: List[List[str]] = [[] for _ in reports]
    channel = open_channel()
    if len({report.digest for report in reports}) > 1:
        name, odd, usual = first_difference(
            [json.loads(text) for text in channel.gather_texts(json.dumps(digests))]
        )
        for rank in odd:
            problems[rank].append(
                f'{name!r} is not equal to that of rank {usual}. Change weights alike on every '
                f'rank, or not at all: look for hooks and model code that depend on the rank or '
                f'its data, and for parameters outside DDP.'
            )
    return problems


def _raise_problems(when: str, problems: Sequence[Sequence[str]], compared: bool = False) -> None:
    if any(problems):
        raise DeviceCheckError(
            when, {rank: list(texts) for rank, texts in enumerate(problems) if texts}, compared
        )


def _devices(runner: HostRunner) -> List[torch.device]:
    """Return the devices where tensors may be: several if the model is split over them."""
    if isinstance(runner.model, MMModelParallel):
        return list(runner.model.devices)
    return [current_accelerator().device(local_rank())]
