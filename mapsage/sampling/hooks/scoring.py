"""From a scorer to scored candidates: where each score is computed, and with which random state.

A scorer with a method ``score`` runs in the loader's workers, through :class:`CandidateFactory`.
Every other scorer runs in the training process, through :class:`CandidateScoring`, which gives each
virtual rank its own seed and its own buffers of the model.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any, Callable, ContextManager, List, Optional, Sequence, Tuple

from mmengine.registry import TASK_UTILS
from torch import nn

from mapsage.accelerator import seed_generators
from mapsage.distributed.wrappers import VirtualDataParallel
from mapsage.sampling import Candidate, Scorer, Scores, TileHistory, WeightedRewards, as_scorer


def build_scorer(score: Any) -> Scorer:
    """Return the scorer for the ``score`` of a config.

    Args:
        score: Config of TASK_UTILS, Scorer, callable, or object with a method ``score(sample)``.

    Raises:
        ValueError: If the score is something else.
    """
    return as_scorer(TASK_UTILS.build(score) if isinstance(score, dict) else score)


@TASK_UTILS.register_module()
class RewardScore(WeightedRewards, Scorer):
    """Score samples by the weighted sum of reward functions, which get the samples of a batch.

    Args:
        rewards: Reward functions: configs of TASK_UTILS, or callables.
        weights: Weight of each reward; 1 for all when None.
    """

    def __init__(self, rewards: Sequence[Any], weights: Optional[Sequence[float]] = None) -> None:
        self._rewards = [build_scorer(reward) for reward in rewards]
        super().__init__(self._rewards, weights)
        self.uses_model = any(reward.uses_model for reward in self._rewards)

    def bind(self, model: nn.Module, collate: Callable[[List[Any]], Any]) -> None:
        """Pass the model and the collate function to the rewards."""
        for reward in self._rewards:
            reward.bind(model, collate)


class CandidateFactory:
    """Turns samples into candidates, in the loader's workers.

    Args:
        scorer: Scorer whose ``score`` is called for each sample; None to leave candidates without a
            score.
    """

    def __init__(self, scorer: Optional[Scorer]) -> None:
        self.scorer = scorer

    def __call__(self, index: int, seed: Tuple[int, ...], sample: Any) -> Candidate:
        """Return the candidate of a sample.

        Args:
            index: Index of the sample in the dataset.
            seed: Seed of its random augmentation.
            sample: Loaded sample.
        """
        candidate = Candidate(sample, index, seed)
        if self.scorer is not None:
            self.score(candidate)
        return candidate

    def score(self, candidate: Candidate) -> float:
        """Score a candidate, and return the score."""
        assert self.scorer is not None
        candidate.score = float(self.scorer.score(candidate.sample))
        return candidate.score


class CandidateScoring:
    """Scores the candidates of a virtual rank: the function that the sampler calls.

    Args:
        scorer: Scorer of the hook.
        model: Model in training, wrapped or not.
        block: Virtual ranks of this process.
        seed: Seed of the run.
        current_step: Function that returns the number of the step being sampled.
        in_background: Whether a background thread samples while the model trains. Then the scorer
            neither draws random numbers nor uses the model, and neither may be touched here.

    Attributes:
        factory: What turns samples into candidates in the loader's workers.
        history: Moving averages of the tiles' scores; None if every sample is scored.
    """

    def __init__(
        self,
        scorer: Scorer,
        model: nn.Module,
        block: range,
        seed: int,
        current_step: Callable[[], int],
        in_background: bool,
    ) -> None:
        self._scorer, self._model, self._block = scorer, model, block
        self._seed, self._current_step = seed, current_step
        self._in_background = in_background
        self.factory = CandidateFactory(scorer if scorer.scores_in_workers else None)
        self.history: Optional[TileHistory] = None
        if scorer.history is not None:
            self.history = TileHistory(scorer, turns=len(block), **scorer.history)
        # Number of batches that each virtual rank has scored in the step.
        self._batches: Counter = Counter()
        self._step = 0

    def __call__(self, rank: int, candidates: Sequence[Candidate]) -> Scores:
        """Return the scores of a virtual rank's batch, and write them into its candidates.

        Args:
            rank: Virtual rank of this process.
            candidates: Candidates of one batch.
        """
        if not self._in_background:
            self._seed_batch(rank)
        if self._scorer.scores_in_workers:
            # Candidates that come without keys were not scored in a worker.
            return [
                self.factory.score(candidate) if candidate.score is None else candidate.score
                for candidate in candidates
            ]
        slot = rank - self._block.start
        self._scorer.begin_batch(slot, self._batches[rank] == 1)
        with self._buffers(rank):
            scores = (
                self._scorer([candidate.sample for candidate in candidates])
                if self.history is None
                else self.history(candidates, slot)
            )
        several = self._scorer.scores_per_sample > 1
        for candidate, score in zip(candidates, scores):
            candidate.score = float(sum(score) / len(score) if several else score)
        return scores

    def _seed_batch(self, rank: int) -> None:
        """Seed the generators that a score may use, by virtual rank, step and batch of the step."""
        step = self._current_step()
        if step != self._step:
            self._step, self._batches = step, Counter()
        self._batches[rank] += 1
        # The leading 2 makes these seeds differ from the seeds of samples and of training steps.
        # AcceleratorHook seeds the training step after this.
        seed_generators(2, self._seed, rank, step, self._batches[rank])

    def _buffers(self, rank: int) -> ContextManager[None]:
        """Return a context in which the model has the buffers of a virtual rank."""
        if isinstance(self._model, VirtualDataParallel) and not self._in_background:
            return self._model.buffers_of(rank)
        return contextlib.nullcontext()
