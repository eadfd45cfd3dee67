"""Batches that hold labeled and unlabeled samples in a fixed ratio."""
from __future__ import annotations

import itertools
from typing import Any, Iterator, List, Optional, Tuple

import torch
from mmengine.dist import get_dist_info
from mmengine.registry import DATA_SAMPLERS
from torch.utils.data import Sampler

from mapsage.accelerator import derived_seed


@DATA_SAMPLERS.register_module()
class LabeledUnlabeledSampler(Sampler):
    """Sampler of a ``SemiSupervisedDataset``: each batch has so many samples of either kind.

    A batch begins with the labeled samples. Each kind is shown again and again, in a new order each
    time. An epoch is over when the kind that lasts longer has been shown once: it has
    ``max(ceil(L / (l W)), ceil(U / (u W)))`` batches on each of W ranks, for L and U samples, l and
    u of them in a batch.

    Which samples all ranks together show in a step does not depend on the number of ranks: four
    with ``labeled=1`` show what one shows with ``labeled=4``.

    Args:
        dataset: ``SemiSupervisedDataset``.
        labeled: Number of labeled samples in a batch, at least 1.
        unlabeled: Number of unlabeled samples in a batch, at least 1. The two are
            ``train_dataloader.batch_size``.
        infinite: Whether to go on without end, for a loop of iterations; False for one of epochs.
        shuffle: Whether the order is random.
        seed: Seed of the order; that of the run when None.

    Raises:
        ValueError: If a number is less than 1, or the dataset is of another kind.
    """

    def __init__(self, dataset: Any, labeled: int, unlabeled: int, infinite: bool = True,
                 shuffle: bool = True, seed: Optional[int] = None) -> None:
        for name, number in (('labeled', labeled), ('unlabeled', unlabeled)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f'LabeledUnlabeledSampler.{name}={number!r}, expected a number of '
                                 'samples in each batch, at least 1.')
        sizes = getattr(dataset, 'sizes', None)
        if not isinstance(sizes, tuple):
            raise ValueError(f'LabeledUnlabeledSampler with the dataset {type(dataset).__name__}, '
                             'expected a SemiSupervisedDataset.')
        self.sizes: Tuple[int, int] = sizes
        self.rank, self.world_size = get_dist_info()
        self.labeled, self.unlabeled = labeled, unlabeled
        self.infinite, self.shuffle = infinite, shuffle
        self.seed, self.epoch = seed or 0, 0
        self.batches = max(-(-size // (count * self.world_size))
                           for size, count in zip(sizes, (labeled, unlabeled)))

    def __len__(self) -> int:
        """Return the number of samples of an epoch on this rank."""
        return self.batches * (self.labeled + self.unlabeled)

    def __iter__(self) -> Iterator[int]:
        kinds = [self._positions(kind) for kind in (0, 1)]
        for _ in itertools.count() if self.infinite else range(self.batches):
            for stream, count in zip(kinds, (self.labeled, self.unlabeled)):
                for _ in range(count):
                    yield next(stream)

    def set_epoch(self, epoch: int) -> None:
        """Begin the order of ``epoch``."""
        self.epoch = epoch

    def _positions(self, kind: int) -> Iterator[int]:
        """Yield this rank's samples of a kind, as indices of the dataset, without end."""
        size, first = self.sizes[kind], kind * self.sizes[0]
        order: List[int] = []
        shown = -1
        for position in itertools.count(self.rank, self.world_size):
            turn, place = divmod(position, size)
            if turn != shown:
                order, shown = self._order(kind, turn), turn
            yield first + order[place]

    def _order(self, kind: int, turn: int) -> List[int]:
        size = self.sizes[kind]
        if not self.shuffle:
            return list(range(size))
        generator = torch.Generator()
        generator.manual_seed(derived_seed(self.seed, self.epoch, kind, turn))
        return torch.randperm(size, generator=generator).tolist()
