"""Names the rank at fault when a collective of torch.distributed itself breaks.

Gradients, metrics and a model's own collectives do not use a channel, which would name the missing
rank. Gloo reports a dead peer by its address only, and a silent peer not at all, just a timeout. So
every rank on which one fails files a report: its error, or none if the error is only the broken
collective. ``lost_ranks.py`` decides from the reports.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import Dict, Iterator, Optional, Sequence, Tuple

import torch.distributed as dist

from .channels.agreement import RankError, error_text
from .channels.channel import RankLostError
from .channels.main_thread import line_of, set_broken_collective
from .channels.open_channels import ask_reports, known_ends, known_pause
from .lost_ranks import Activity, Record, Report, find_culprit, watched_losses
from .store import LockedStore

# How NCCL and eccl name a call that they refuse.
_REFUSALS = ('ncclInvalidArgument', 'ecclInvalidArgument')
# Numbers of the blocks, for the names of their records; equal on all ranks.
_blocks = itertools.count()


@contextmanager
def lost_ranks_named(activity: str) -> Iterator[None]:
    """Turn the error of a broken collective in the block into one that names the rank at fault.

    Other errors pass unchanged. Every rank must enter the block.

    Args:
        activity: Phrase for the error message, for example ``'training'``.

    Raises:
        RankError: If a collective broke because another rank failed with an error.
        RankLostError: If a collective broke because ranks died, hang or took another path.
    """
    name = f'mapsage/lost_ranks/{next(_blocks)}'
    set_broken_collective(None)
    try:
        yield
    except Exception as error:
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            raise
        try:
            cause = _find_cause(name, error, activity)
        # Usually the process that keeps the store has ended. Whatever fails here must not replace
        # the error of the block.
        except Exception:
            ended = (watched_losses() or known_ends()) if _is_broken_collective(error) else {}
            cause = _make_lost_error(ended, error, activity) if ended else None
        if cause is None:
            raise
        raise cause from error


def _find_cause(name: str, error: Exception, activity: str) -> Optional[Exception]:
    """File this rank's report, and return the error that names the rank at fault.

    Returns:
        None if ``error`` is not a broken collective, or if the cause cannot be found.
    """
    rank, is_broken = dist.get_rank(), _is_broken_collective(error)
    is_cause = not is_broken and not isinstance(error, (RankError, RankLostError))
    if not is_cause:
        set_broken_collective(error)
    ranks = range(dist.get_world_size())
    store = LockedStore(dist.distributed_c10d._get_default_store())
    record = Record(store, name, rank, ranks)
    record.file(
        Report(
            activity=Activity.IN_COLLECTIVE,
            line=line_of(error),
            paused=int(known_pause()),
            error=error_text(error) if is_cause else '',
        )
    )
    if not is_broken:
        return None

    # A rank that does not answer may have reported in the meantime, and then ended.
    def ask(silent: Sequence[int]) -> Dict[int, Report]:
        answers = {**ask_reports(f'{name}/silent'), **record.reports()}
        return {rank: answers[rank] for rank in silent if rank in answers}

    def silent_ends(silent: Sequence[int]) -> Dict[int, str]:
        ends = known_ends(silent)
        reports = record.reports() if ends else {}
        return {rank: text for rank, text in ends.items() if rank not in reports}

    finding = record.settle(lambda reports: find_culprit(reports, ranks, silent_ends, ask))
    if finding is not None and finding.failed is not None:
        return RankError(*finding.failed, activity)
    # A watch names the ranks that broke the collective; others that did not report were late.
    lost = watched_losses()
    if not lost and finding is not None:
        lost = {rank: finding.reasons.get(rank, '') for rank in finding.ranks}
    elif not lost:
        lost = known_ends()
    return None if finding is None and not lost else _make_lost_error(lost, error, activity)


def _make_lost_error(ranks: Dict[int, str], error: Exception, activity: str) -> RankLostError:
    """Return the error about lost ranks, with what is known about them."""
    rank = dist.get_rank()
    # If other ranks are lost too, this rank may only have failed after the reports were read.
    ranks = {lost_rank: reason for lost_rank, reason in ranks.items() if lost_rank != rank} or ranks
    description = (
        f'the others have waited for it, rank {rank}, in vain'
        if rank in ranks
        else f'rank(s) {list(ranks)} did not come to it in time'
        if ranks
        else 'every rank failed in it, so one was late'
    )
    reasons = ''.join(f'{reason[:1].upper()}{reason[1:]}. ' for reason in ranks.values() if reason)
    advice = (
        'The others have given up.'
        if rank in ranks
        else 'They died, hang, or took a path '
        'without this collective: look at the first error in their log.'
    )
    return RankLostError(
        f'rank {rank} waited in a collective of torch.distributed in {activity} and {description} '
        f'({(str(error).splitlines() or [""])[0]}). {reasons}{advice}',
        list(ranks),
    )


def _is_broken_collective(error: BaseException) -> bool:
    """Return whether an error comes from a backend, because of another rank."""
    # A tensor or an operation that the backend does not take, such as int64 with eccl.
    if any(refusal in str(error) for refusal in _REFUSALS):
        return False
    # torch 1.10 has none of these classes, and raises RuntimeError.
    kinds: Tuple[type, ...] = tuple(
        getattr(dist, name)
        for name in ('DistBackendError', 'DistNetworkError')
        if hasattr(dist, name)
    )
    return isinstance(error, kinds) or (type(error) is RuntimeError and 'gloo/' in str(error))
