"""Sampler for batches with a fixed number of labeled and of unlabeled samples.

The order of each kind is one endless sequence over all ranks, from which the ranks take every W-th
sample. So the samples of a step do not depend on the number of ranks, if the batch size per step
is the same. `joined.py` has the dataset.
"""

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
    """Sampler of a ``SemiSupervisedDataset``: a batch has fixed numbers of samples of both kinds.

    A batch begins with the labeled samples. Each kind repeats without end, in a new order for each
    pass. An epoch ends when all samples of both kinds have been shown at least once: with L labeled
    and U unlabeled samples, l and u of them in a batch, and W ranks, it has
    ``max(ceil(L / (l W)), ceil(U / (u W)))`` batches on each rank.

    The samples that all ranks together show in a step do not depend on the number of ranks: four
    ranks with ``labeled=1`` show the same samples as one rank with ``labeled=4``.

    Args:
        dataset: ``SemiSupervisedDataset``.
        labeled: Number of labeled samples in a batch, at least 1.
        unlabeled: Number of unlabeled samples in a batch, at least 1. The sum of both numbers is
            ``train_dataloader.batch_size``.
        infinite: Whether the indices never end, which an ``IterBasedTrainLoop`` needs; False for an
            ``EpochBasedTrainLoop``.
        shuffle: Whether the order is random.
        seed: Seed of the order. If the config has none, MMEngine passes the seed of the run.

    Raises:
        ValueError: If a number is less than 1, or the dataset is of another kind.
    """

    def __init__(
        self,
        dataset: Any,
        labeled: int,
        unlabeled: int,
        infinite: bool = True,
        shuffle: bool = True,
        seed: Optional[int] = None,
    ) -> None:
        for name, number in (('labeled', labeled), ('unlabeled', unlabeled)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(
                    f'LabeledUnlabeledSampler.{name}={number!r}, expected a number of '
                    'samples in each batch, at least 1.'
                )
        # A wrapper that forwards attributes is accepted too.
        sizes = getattr(dataset, 'sizes', None)
        if not isinstance(sizes, tuple):
            raise ValueError(
                f'LabeledUnlabeledSampler with the dataset {type(dataset).__name__}, '
                'expected a SemiSupervisedDataset.'
            )
        self.sizes: Tuple[int, int] = sizes
        self.rank, self.world_size = get_dist_info()
        self.labeled, self.unlabeled = labeled, unlabeled
        self.infinite, self.shuffle = infinite, shuffle
        self.seed, self.epoch = seed or 0, 0
        self.batches = max(
            -(-size // (count * self.world_size))
            for size, count in zip(sizes, (labeled, unlabeled))
        )

    def __len__(self) -> int:
        """Return the number of samples of an epoch on this rank."""
        return self.batches * (self.labeled + self.unlabeled)

    def __iter__(self) -> Iterator[int]:
        streams = [self._indices(kind) for kind in (0, 1)]
        for _ in itertools.count() if self.infinite else range(self.batches):
            for stream, count in zip(streams, (self.labeled, self.unlabeled)):
                for _ in range(count):
                    yield next(stream)

    def set_epoch(self, epoch: int) -> None:
        """Select the order of ``epoch`` for the next iteration over the sampler."""
        self.epoch = epoch

    def _indices(self, kind: int) -> Iterator[int]:
        """Yield the dataset indices of this rank's samples of a kind (0: labeled), without end."""
        size, first = self.sizes[kind], kind * self.sizes[0]
        order: List[int] = []
        order_pass = -1
        for position in itertools.count(self.rank, self.world_size):
            number, offset = divmod(position, size)
            if number != order_pass:
                order, order_pass = self._order(kind, number), number
            yield first + order[offset]

    def _order(self, kind: int, number: int) -> List[int]:
        """Return the order of all samples of a kind in pass ``number`` over them."""
        size = self.sizes[kind]
        if not self.shuffle:
            return list(range(size))
        generator = torch.Generator()
        generator.manual_seed(derived_seed(self.seed, self.epoch, kind, number))
        return torch.randperm(size, generator=generator).tolist()
