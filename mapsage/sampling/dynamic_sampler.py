"""The sampler of a process that is one rank: it takes and returns one batch, not one per rank.

`sampler.py` has the loop, also for processes that run several virtual ranks.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Sequence

from .sampler import BlockSampler
from .step import SampledBatch
from .validity import Validity


class DynamicSampler(BlockSampler):
    """Fetch, score and judge on all ranks in lockstep until every rank has its share.

    The constructor and :meth:`sample` are collective. A step whose batches are all valid costs one
    collective of 64 bytes from each rank. A validity with a quantile adds one for the scores, and
    ``unbiased`` one for the weights, 8 bytes per group.

    Args:
        fetch: Function ``fetch(wanted)`` that returns this rank's next samples as a sequence of
            whole groups, and raises StopIteration at the end of the data. ``wanted`` is the number
            of samples that the step lacks on this rank; more or fewer may come, and 0 is asked
            for where other ranks make up the deficit. All ranks call it equally often, so it may
            contain collectives.
        score: Function that returns one number per sample of a batch, on any device.
        validity: Criteria for valid groups.
        local_target: Number of samples for each rank.
        group_size: Number of consecutive samples that stay together; divides ``local_target``.
        max_resample_times: Number of resamples a step may make. Each asks for the deficit of all
            ranks, divided by the pass rate, and for ``max_refill_rounds`` times the target at most:
            with 3 and 4, a step may draw 13 times its target.
        shortfall: Policy if the resamples do not suffice, see :func:`decide_shortfall`.
        max_age: Number of steps that a surplus group may wait in the pool. With 0, resamples ask
            for somewhat less, because surplus is lost. None means 0 if the validity judges a spread
            (``eps``), because a surplus group is of an older policy then, and else 1.
        max_refill_rounds: Largest number of samples that one resample asks for, as a multiple of
            the target.
        keep_fraction: Probability with which a group that is not valid is kept at random.
        unbiased: Whether such a group weighs ``1 / keep_fraction`` in :attr:`SampledBatch.weights`,
            so that the weighted batches have the class prior of the data.
        scores_per_sample: Number of scores per sample, such as rewards, in sequence.
        seed: Seed of the random keep, which also depends on rank, step and resample.
        channel: Channel to the ranks that sample together, used for nothing else; when None, a
            :func:`default_channel` over gloo.
        group: Process group for the default channel; all ranks when None.
        timeout: Seconds a rank may be late on the default channel; half an hour when None.
        place: Function that returns a sample from another rank on the device where this rank
            needs it.
        observe: Function called with the samples of each group and the reason why it is dropped,
            ``''`` if it is kept.
        group_key: Function that returns the key of a sample, such as the number of a rollout, in
            place of ``group_size``: samples with equal keys in a round are a group, of any size and
            on any ranks. It is judged as a whole, and its samples are counted, moved and filled up
            one by one; :attr:`SampledBatch.group_scores` has the scores of all its members. Fetches
            ask for the same number on all ranks.
        logger: Logger for a warning on the first rank about each step that falls short, for INFO
            lines there about the first 100 steps with missing samples, and for DEBUG lines
            otherwise.

    Attributes:
        totals: Sums over the steps since the caller last cleared them.

    Raises:
        ValueError: For a setting out of range.
        LockstepError: On every rank, if a rank has different settings.
    """

    def __init__(
        self,
        fetch: Callable[[int], Sequence[Any]],
        score: Callable[[Sequence[Any]], Any],
        validity: Validity,
        local_target: int,
        **settings: Any,
    ) -> None:
        super().__init__(
            lambda rank, wanted: fetch(wanted),
            lambda rank, samples: score(samples),
            validity,
            local_target,
            **settings,
        )

    def sample(self, initial: Optional[Sequence[Any]] = None) -> SampledBatch:
        """Return this rank's share of the next step. Collective.

        Args:
            initial: Batch to begin with; fetched when None.

        Raises:
            EndOfData: And others, as :meth:`sample_block` does.
        """
        return self.sample_block(None if initial is None else [initial])[0]

    def state_dict(self) -> Dict[str, Any]:
        """Return what a resumed run needs of this rank: step, pass rate, latest scores, pool.

        Every rank has a state of its own. ``torch.load(weights_only=True)`` reads it if the samples
        are tensors, numbers, texts, and containers of these.
        """
        state = super().state_dict()
        [state['pool']] = state.pop('pools')
        return state

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`. Samples left out of its pool add to not_restored.

        Raises:
            OtherRankError: If it is the state of another rank, or of another number of ranks.
        """
        super().load_state_dict(dict(state, pools=[state['pool']]))
