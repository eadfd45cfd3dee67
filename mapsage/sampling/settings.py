"""The settings of dynamic sampling, which check themselves.

`BlockSampler`, `DynamicSampler` and the hook of MMEngine pass them on by their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Hashable, Optional

from .shortfall import check_policy
from .validity import Validity


@dataclass
class SamplingSettings:
    """What decides which samples fill a step; equal on all ranks.

    Attributes:
        validity: Criteria for valid groups.
        local_target: Number of samples that a virtual rank trains on in a step.
        group_size: Number of consecutive samples that stay together and are judged together;
            divides ``local_target``.
        max_resample_times: Number of resamples a step may make. Each asks for the deficit of all
            ranks, divided by the pass rate.
        shortfall: Policy if the resamples do not suffice: ``'fallback'``, ``'pad'``, ``'mask'``,
            ``'shrink'`` or ``'raise'``, see :func:`decide_shortfall`. ``'mask'`` weighs samples, as
            ``unbiased`` does.
        max_age: Number of steps that a surplus group may wait in the pool. With 0, resamples ask
            for somewhat less, because surplus is lost. None means 0 if the validity judges a spread
            (``eps``), because a surplus group is of an older policy then, and else 1.
        max_refill_rounds: Largest number of samples that one resample asks for, as a multiple of
            the target (of the loader's batch in the hook): with ``max_resample_times=3`` and 4, a
            step may draw 12 times its target beyond the first batch.
        keep_fraction: Probability with which a group that is not valid is kept at random.
        unbiased: Whether such a group weighs ``1 / keep_fraction`` in :attr:`SampledBatch.weights`,
            so that the weighted batches have the class prior of the data. The hook needs heads of
            MMSegmentation with cross-entropy for it.
        scores_per_sample: Number of scores per sample, such as rewards, in sequence. The hook takes
            it from its scorer.
        group_key: Function that returns the key of a sample, such as the number of a rollout, in
            place of ``group_size``: samples with equal keys in a round are a group, of any size and
            on any ranks. It is judged as a whole, and its samples are counted, moved and filled up
            one by one; :attr:`SampledBatch.group_scores` has the scores of all its members. Fetches
            ask for the same number on all ranks. Not for the hook.

    Raises:
        ValueError: For a setting out of range, or settings that do not go together.
    """

    validity: Validity
    local_target: int
    group_size: int = 1
    max_resample_times: int = 3
    shortfall: str = 'fallback'
    max_age: Optional[int] = None
    max_refill_rounds: int = 4
    keep_fraction: float = 0.0
    unbiased: bool = False
    scores_per_sample: int = 1
    group_key: Optional[Callable[[Any], Hashable]] = None

    def __post_init__(self) -> None:
        if self.max_age is None:
            self.max_age = self.validity.default_max_age
        size = max(1, self.group_size)
        if self.group_size < 1 or self.local_target < 1 or self.local_target % size:
            raise ValueError(
                f'local_target={self.local_target}, group_size={self.group_size}: expected a whole '
                f'number of groups on each rank, for example local_target='
                f'{max(1, self.local_target // size) * size}, group_size={size}.'
            )
        if self.max_resample_times < 0:
            raise ValueError(f'max_resample_times={self.max_resample_times}, expected 0 or more.')
        if self.max_refill_rounds < 1:
            raise ValueError(f'max_refill_rounds={self.max_refill_rounds}, expected 1 or more.')
        if not 0 <= self.keep_fraction <= 1:
            raise ValueError(f'keep_fraction={self.keep_fraction}, expected a share from 0 to 1.')
        if self.unbiased and not self.keep_fraction:
            raise ValueError(
                'unbiased=True with keep_fraction=0: what is never trained on cannot be '
                'weighed up. Set keep_fraction, for example 0.3.'
            )
        check_policy(self.shortfall)
        if self.group_key is None:
            self.validity.check_group_size(self.group_size * self.scores_per_sample)
            return
        for name, expected, reason in (
            ('group_size', 1, 'the keys say what belongs together'),
            (
                'max_age',
                0,
                'a group may lie on several ranks and is used in the step that judged it',
            ),
            ('keep_fraction', 0, 'parts of a group would be kept without the others'),
        ):
            value = getattr(self, name)
            if value != expected:
                raise ValueError(f'group_key with {name}={value}: {reason}. Set {name}={expected}.')

    def describe_random_keep(self) -> str:
        """Return a line for the log: how groups that are kept at random weigh."""
        start = (
            f'[DynSample] keep_fraction={self.keep_fraction:g}, unbiased={self.unbiased}: a group '
            f'that is not valid and is kept weighs '
        )
        if self.unbiased:
            return start + (
                f'1/{self.keep_fraction:g} times as much in the loss as '
                f'a valid one, so that the class prior is that of the data.'
            )
        return start + (
            'as much as a valid one, so that the class prior moves toward that of the valid ones.'
        )
