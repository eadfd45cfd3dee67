"""Decide how many samples to fetch when valid ones are missing, and what to train on in the end. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Dict, List, Sequence, Tuple

from mapsage.base.errors import UserError

from .plan import ExchangePlan, plan_exchange

FALLBACK = 'fallback'
POLICIES = (FALLBACK, 'pad', 'mask', 'shrink', 'raise')


class ShortfallError(UserError, RuntimeError):
    """There are too few valid samples, and the policy cannot or must not make up for them."""

    on_every_rank = True


@dataclass(frozen=True)
class Decision:
    """How the batches of a step are made; equal on every rank.

    Attributes:
        outcome: ``'valid'``, ``'fallback'``, ``'pad'``, ``'mask'`` or ``'shrink'``.
        plan: Plan of the exchange between the ranks, of the original samples if the outcome is
            ``'fallback'``, and otherwise of the valid ones.
        supplies: Indices of the samples that each rank supplies, repeated where they are
            replicated.
        loss_weights: Factor by which each rank multiplies its mean loss, so that the average of
            the ranks' gradients is the gradient of the mean loss over all samples.
        sample_weights: Factor by which the loss of each supplied sample is multiplied, with a mean
            of 1 over all ranks; empty if all are 1.
    """

    outcome: str
    plan: ExchangePlan
    supplies: Tuple[Tuple[int, ...], ...]
    loss_weights: Tuple[float, ...]
    sample_weights: Tuple[Tuple[float, ...], ...] = ()


def check_policy(policy: str) -> None:
    """Raise ValueError for a policy that does not exist."""
    if policy not in POLICIES:
        raise ValueError(f'shortfall={policy!r}, expected one of {", ".join(POLICIES)}.')


def decide_shortfall(
    policy: str,
    valid_counts: Sequence[int],
    original_counts: Sequence[int],
    target: int,
    group_size: int = 1,
) -> Decision:
    """Decide how the ranks' batches are made from the valid samples. Pure.

    With enough valid samples the policy does not matter. With none, every policy but ``raise``
    falls back.

    Args:
        policy: Name of the policy. With ``'fallback'``, every rank takes the first samples it drew
            in the step, as many as its target; a rank that drew fewer gets surplus of other ranks,
            and if all ranks together drew too few, groups are replicated as with ``'pad'``. With
            ``'pad'``, valid groups are replicated, and their numbers of copies differ by at most
            one. ``'mask'`` fills the batches with the same copies, but they weigh 0 and the valid
            samples weigh more, so that the weighted mean over all ranks is the mean over the valid
            samples, and every rank has its target. With ``'shrink'``, the ranks' numbers of groups
            differ by at most one, and weights compensate for it; with fewer groups than ranks the
            remaining ranks compute on a copy of weight 0, so that no rank is missing from a
            collective. ``'raise'`` is an error.
        valid_counts: Number of valid samples each rank has.
        original_counts: Number of original samples each rank has, whether valid or not.
        target: Number of samples for each rank.
        group_size: Number of samples that stay together.

    Raises:
        ShortfallError: With policy ``'raise'``, or if no rank drew any sample.
        ValueError: As in :func:`plan_exchange`, or for a policy that does not exist.
    """
    check_policy(policy)
    world, total = len(valid_counts), sum(valid_counts)
    plain = tuple(tuple(range(count)) for count in valid_counts)
    if total >= world * target:
        plan = plan_exchange(valid_counts, target, group_size)
        return Decision('valid', plan, plain, (1.0,) * world)
    if policy == 'raise':
        raise ShortfallError(
            f'{total}/{world * target} valid samples after all attempts, and shortfall=raise. '
            f'Allow more of them (max_resample_times), widen the validity, or choose '
            f"shortfall='mask', 'pad', 'shrink' or 'fallback'."
        )
    if policy == FALLBACK or not total:
        return _fall_back(original_counts, total, target, group_size)
    groups = [count // group_size for count in valid_counts]
    if policy == 'pad':
        return _replicate('pad', groups, target, group_size)
    if policy == 'mask':
        padded = _replicate('mask', groups, target, group_size)
        # The first samples that a rank supplies are its valid ones, the others repeat them.
        return replace(
            padded,
            sample_weights=tuple(
                tuple(
                    world * target / total if position < count else 0.0
                    for position in range(len(supply))
                )
                for count, supply in zip(valid_counts, padded.supplies)
            ),
        )
    return _shrink(groups, group_size)


def _fall_back(
    original_counts: Sequence[int], valid: int, target: int, group_size: int
) -> Decision:
    world, total = len(original_counts), sum(original_counts)
    if not total:
        raise ShortfallError(
            f'{valid}/{world * target} valid samples, and no rank drew a batch to fall back to: '
            f'their loaders ended or gave empty batches. Look at the length of the dataset and at '
            f'drop_last.'
        )
    if total < world * target:
        return _replicate(
            FALLBACK, [count // group_size for count in original_counts], target, group_size
        )
    plain = tuple(tuple(range(count)) for count in original_counts)
    return Decision(
        FALLBACK, plan_exchange(original_counts, target, group_size), plain, (1.0,) * world
    )


def _replicate(outcome: str, groups: Sequence[int], target: int, group_size: int) -> Decision:
    copies = _pad(groups, target // group_size)
    plan = plan_exchange(
        [len(groups_of_rank) * group_size for groups_of_rank in copies], target, group_size
    )
    return Decision(outcome, plan, _samples(copies, group_size), (1.0,) * len(groups))


def _shrink(groups: List[int], group_size: int) -> Decision:
    world, total = len(groups), sum(groups)
    if total < world:
        # One group per rank; copies get weight 0.
        copies = _pad(groups, 1)
    else:
        copies = [list(range(count)) for count in groups]
    share, remainder = divmod(max(total, world), world)
    # The larger shares go to the ranks with most groups, which need no moves for it.
    larger = set(sorted(range(world), key=lambda rank: (-len(copies[rank]), rank))[:remainder])
    targets = [(share + (rank in larger)) * group_size for rank in range(world)]
    plan = plan_exchange([len(c) * group_size for c in copies], targets, group_size)
    weights = [count * world / (total * group_size) for count in targets]
    for rank in range(world) if total < world else ():
        source, index = _first_source(plan, rank)
        if index >= groups[source] * group_size:
            weights[rank] = 0.0
    return Decision('shrink', plan, _samples(copies, group_size), tuple(weights))


def _pad(groups: Sequence[int], target: int) -> List[List[int]]:
    """Return the indices of the groups that each rank supplies, beginning with all of them.

    A rank that lacks groups replicates those it has before another rank sends it any.
    """
    total, world = sum(groups), len(groups)
    times, more = divmod(world * target, total)
    extra = [0] * world
    # Ranks that can use the copies themselves come first.
    for rank, count in enumerate(groups):
        extra[rank] = min(more, count, max(0, target - count * times))
        more -= extra[rank]
    for rank, count in enumerate(groups):
        added = min(more, count - extra[rank])
        extra[rank] += added
        more -= added
    return [
        list(range(count)) * times + list(range(extra[rank])) for rank, count in enumerate(groups)
    ]


def _first_source(plan: ExchangePlan, rank: int) -> Tuple[int, int]:
    if plan.kept(rank):
        return rank, 0
    return next(
        (move.source_rank, move.source_index)
        for move in plan.moves
        if move.destination_rank == rank
    )


def _samples(copies: Sequence[Sequence[int]], group_size: int) -> Tuple[Tuple[int, ...], ...]:
    return tuple(
        tuple(group * group_size + k for group in groups for k in range(group_size))
        for groups in copies
    )


# Factor by which the counts of earlier steps lose weight in every step.
_MEMORY = 0.9


class PassRate:
    """The share of valid samples, weighted toward recent steps; equal on all ranks."""

    def __init__(self) -> None:
        self._judged = self._passed = self._not_finite = 0.0

    def age(self) -> None:
        """Begin a step: the counts of earlier steps lose weight."""
        self._judged *= _MEMORY
        self._passed *= _MEMORY
        self._not_finite *= _MEMORY

    def add(self, judged: int, passed: int, not_finite: int = 0) -> None:
        """Add counts of all ranks: samples that were judged, that passed, that were not finite."""
        self._judged += judged
        self._passed += passed
        self._not_finite += not_finite

    @property
    def value(self) -> float:
        """The running share; 0 before any sample was judged."""
        return self._passed / self._judged if self._judged else 0.0

    def kept(self, keep_fraction: float) -> float:
        """Return the running share of samples with finite scores that are valid or kept at random.

        Args:
            keep_fraction: Probability with which a sample that is not valid is kept.
        """
        finite = self._judged - self._not_finite
        valid = self._passed / finite if finite > 0 else 1.0
        return valid + (1 - valid) * keep_fraction

    def state_dict(self) -> Dict[str, float]:
        """Return what :meth:`load_state_dict` takes."""
        return dict(judged=self._judged, passed=self._passed, not_finite=self._not_finite)

    def load_state_dict(self, state: Dict[str, float]) -> None:
        """Continue from :meth:`state_dict`."""
        self._judged, self._passed = state['judged'], state['passed']
        self._not_finite = state.get('not_finite', 0.0)


def refill_size(deficit: int, pass_rate: float, limit: int, deviations: float = 0.0) -> int:
    """Return how many groups all ranks together ask for in one resample. Pure.

    Of n groups, ``n p`` are expected to be valid, with a standard deviation of
    ``sqrt(n p (1 - p))``. Asking for ``deficit / p`` is too much or too little equally often.

    Args:
        deficit: Number of groups missing on all ranks together, at least 1.
        pass_rate: Share of groups that is usable. At 0 the answer is the deficit, because nothing
            suggests that more would help.
        limit: Largest number to return.
        deviations: Number of standard deviations by which the deficit lies above the expected
            number of valid groups. 1 asks for less, so that hardly any surplus comes; -2 asks for
            more, so that hardly any group is missing.
    """
    if pass_rate <= 0:
        return min(deficit, limit)
    rate = min(pass_rate, 1.0)
    # Compare before dividing: a tiny rate makes the quotient infinite.
    if deficit >= limit * rate:
        return limit
    # The positive root of rate * x**2 + shift * x = deficit, with x = sqrt(n).
    shift = deviations * math.sqrt(rate * (1 - rate))
    groups = ((math.sqrt(shift**2 + 4 * rate * deficit) - shift) / (2 * rate)) ** 2
    # Rounding errors must not ask for one group more.
    whole = math.floor(groups + 0.5) if deviations > 0 else math.ceil(groups * (1 - 1e-12))
    return max(1, min(whole, limit))


def divide_groups(groups: int, ranks: int, first: int) -> List[int]:
    """Return how many groups each rank asks for, equal to within one. Pure.

    Args:
        groups: Number of groups that all ranks together ask for.
        ranks: Number of ranks.
        first: Rank that gets the first group of the remainder. It changes with the step, so that
            all ranks draw equally often.
    """
    share, remainder = divmod(groups, ranks)
    return [share + ((rank - first) % ranks < remainder) for rank in range(ranks)]
