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
        **settings: The other fields of :class:`SamplingSettings`, and ``seed``, ``channel``,
            ``group``, ``timeout``, ``place``, ``observe`` and ``logger`` of :class:`BlockSampler`.

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
