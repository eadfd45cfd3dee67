"""Scorers: the objects that give each sample the number by which dynamic sampling judges it.

A scorer overrides one of two methods: ``score`` judges one sample in the loader's workers, and
``__call__`` judges the samples of a batch in the training process. All other members have defaults.
Users may also pass a plain function, or an object with only the members that it needs:
:func:`as_scorer` wraps these, so that the sampling code deals with a :class:`Scorer` only.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from torch import nn

from .settings import SamplingSettings
from .shortfall import FALLBACK
from .step import SampledBatch
from .validity import Scores, Validity


class BatchShare(NamedTuple):
    """What a scorer that takes part in the loss needs to know of a virtual rank's batch.

    Attributes:
        slot: Position of the virtual rank in the block of this process.
        share: Estimate of the share of all samples that the batch represents: the pass rate of the
            initial batch, or 1 if the batch was not filtered.
        loss_weight: Factor of the mean over the batch, see ``SampledBatch``.
    """

    slot: int
    share: float
    loss_weight: float

    @classmethod
    def of(cls, batch: SampledBatch, slot: int) -> BatchShare:
        """Return the share that a batch represents.

        The number of samples that a step judges depends on how many of them passed. The size of the
        initial batch does not, so its pass rate is an unbiased estimate. If the initial batch had
        no judged sample, the step counts as not filtered.
        """
        statistics = batch.statistics
        filtered = statistics.outcome != FALLBACK and not math.isnan(statistics.first_pass_rate)
        share = statistics.first_pass_rate if filtered else 1.0
        return cls(slot, share, batch.loss_weight)


class Scorer:
    """Base class of scorers. A subclass overrides either :meth:`score` or :meth:`__call__`.

    Attributes:
        uses_model: Whether the scorer reads the model in training. Then a step cannot be sampled
            while the previous one changes the weights.
        weighs_loss: Whether the scorer applies the ``loss_weight`` of the shortfall policy itself.
        scores_per_sample: Number of scores of each sample, such as the rewards of several drawn
            label maps.
        history: Keyword arguments of :class:`TileHistory`, to score a tile again only after a
            while; None to score every sample.
    """

    uses_model: bool = False
    weighs_loss: bool = False
    scores_per_sample: int = 1
    history: Optional[Dict[str, Any]] = None

    @property
    def name(self) -> str:
        """Name for messages."""
        return type(self).__name__

    @property
    def scores_in_workers(self) -> bool:
        """Whether :meth:`score` exists, so that the loader's workers score each sample."""
        return type(self).score is not Scorer.score

    @property
    def follows_step(self) -> bool:
        """Whether :meth:`follow` exists, so that the scorer takes part in the step's loss."""
        return type(self).follow is not Scorer.follow

    def score(self, sample: Any) -> float:
        """Return the score of one sample. Called in the loader's workers."""
        raise NotImplementedError(f'{self.name} overrides neither score() nor __call__().')

    def __call__(self, samples: Sequence[Any]) -> Scores:
        """Return the scores of a batch.

        Args:
            samples: Samples as the dataset returned them.

        Returns:
            One number per sample, or ``scores_per_sample`` numbers each, on any device.
        """
        return [self.score(sample) for sample in samples]

    def bind(self, model: nn.Module, collate: Callable[[List[Any]], Any]) -> None:
        """Take the model in training and the loader's collate function, before the first score."""

    def check_sampling(self, validity: Validity, settings: Dict[str, Any]) -> None:
        """Raise ValueError if the settings of the sampling hook do not suit the scorer."""

    def describe(self) -> str:
        """Return a text that must be equal on all ranks; ``''`` to compare nothing."""
        return ''

    def follow(self, step: Callable[[], Optional[BatchShare]]) -> None:
        """Take the function that returns the current batch's share; it returns None before any."""

    def begin_batch(self, slot: int, first: bool) -> None:
        """Prepare for the next batch.

        Args:
            slot: Position of the batch's virtual rank in the block of this process.
            first: Whether it is the first batch of the step.
        """

    def save_pictures(
        self, folder: Path, metainfo: Mapping[str, Any], channels: Optional[Tuple[int, ...]]
    ) -> None:
        """Write pictures of recently scored samples. Called on the first rank, with the gallery.

        Args:
            folder: Folder for the files.
            metainfo: ``classes`` and ``palette`` of the dataset.
            channels: Channels of the inputs that are red, green and blue; None for MMCV's order.
        """


class _AdaptedScorer(Scorer):
    """A user's function or object as a :class:`Scorer`.

    Args:
        users: Callable that takes samples, or an object with a method ``score(sample)``; other
            members of :class:`Scorer` are used if it has them.
    """

    def __init__(self, users: Any) -> None:
        self._users = users
        self.uses_model = self._member('uses_model', Scorer.uses_model)
        self.weighs_loss = self._member('weighs_loss', Scorer.weighs_loss)
        self.scores_per_sample = self._member('scores_per_sample', Scorer.scores_per_sample)
        self.history = self._member('history', Scorer.history)

    @property
    def name(self) -> str:
        return self._member('__name__', type(self._users).__name__)

    @property
    def scores_in_workers(self) -> bool:
        return self._member('score') is not None

    @property
    def follows_step(self) -> bool:
        return self._member('follow') is not None

    def score(self, sample: Any) -> float:
        return self._users.score(sample)

    def __call__(self, samples: Sequence[Any]) -> Scores:
        return super().__call__(samples) if self.scores_in_workers else self._users(samples)

    def bind(self, model: nn.Module, collate: Callable[[List[Any]], Any]) -> None:
        self._call('bind', model, collate)

    def check_sampling(self, validity: Validity, settings: Dict[str, Any]) -> None:
        self._call('check_sampling', validity, settings)

    def describe(self) -> str:
        return self._call('describe') or ''

    def follow(self, step: Callable[[], Optional[BatchShare]]) -> None:
        self._call('follow', step)

    def begin_batch(self, slot: int, first: bool) -> None:
        self._call('begin_batch', slot, first)

    def save_pictures(
        self, folder: Path, metainfo: Mapping[str, Any], channels: Optional[Tuple[int, ...]]
    ) -> None:
        self._call('save_pictures', folder, metainfo, channels)

    def _call(self, method: str, *args: Any) -> Any:
        function = self._member(method)
        return None if function is None else function(*args)

    def _member(self, name: str, default: Any = None) -> Any:
        return getattr(self._users, name, default)


def check_scorer(scorer: Scorer, settings: SamplingSettings, prefetch: bool) -> None:
    """Check whether a scorer and the settings of the sampling hook suit each other.

    Args:
        scorer: The scorer.
        settings: Settings of the sampling.
        prefetch: Whether the next step is sampled while this one computes.

    Raises:
        ValueError: If they do not.
    """
    scorer.check_sampling(settings.validity, dict(vars(settings)))
    name = scorer.name
    if settings.shortfall == 'mask' and scorer.follows_step:
        raise ValueError(
            f"shortfall='mask' with {name}: it computes a loss of its own, which "
            f"knows no weights of samples. Choose 'shrink' or 'pad'."
        )
    if prefetch and scorer.uses_model:
        raise ValueError(
            f'prefetch=True with {name}: it would read weights while the step '
            f'changes them. Set prefetch=False, or score by labels.'
        )
    if settings.group_size > 1 and scorer.history is not None:
        raise ValueError(
            f'group_size={settings.group_size} with {name}: it remembers one score per '
            f'tile, and all views of a tile would get it. Set group_size=1.'
        )


def as_scorer(score: Any) -> Scorer:
    """Return a :class:`Scorer` for what a user passed as a score.

    Args:
        score: A Scorer, a callable that takes the samples of a batch, or an object with a method
            ``score(sample)``.

    Raises:
        ValueError: If the score is something else.
    """
    if isinstance(score, Scorer):
        return score
    if not callable(score) and not hasattr(score, 'score'):
        raise ValueError(
            f'score={score!r}, expected a config such as '
            f"dict(type='LabelScore', metric='class_entropy') or a callable."
        )
    return _AdaptedScorer(score)
