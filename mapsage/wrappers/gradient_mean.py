"""The mean of gradients over all virtual ranks, after the backward passes."""
from __future__ import annotations

from typing import Any, List, Optional, Sequence

import torch
import torch.distributed as dist
from torch import nn

from mapsage.distributed import open_channel
from mapsage.distributed.ordered_sum import Fold, OrderedSum
from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError

_BUCKET_BYTES = 25 * 2**20  # DDP's default, bucket_cap_mb


class GradientMean:
    """Adds up the gradients of the virtual ranks and divides the sum by their number.

    Args:
        ranks: Virtual ranks of the run.
        rank: Rank of this process.
        reduction: ``'ordered'``, or ``'native'`` for the backend's own sum over processes.
        may_miss: Whether a virtual rank may have no gradient for a parameter that others have one
            for, or none may; this counts as zeros, as under DDP.
    """

    def __init__(self, ranks: VirtualRanks, rank: int, reduction: str, may_miss: bool) -> None:
        self._ranks, self._rank = ranks, rank
        self._may_miss = may_miss
        self._sum = _NativeSum() if reduction == 'native' else OrderedSum(ranks, rank)
        self._channel = open_channel(purpose='gradients')
        self._parameters: List[nn.Parameter] = []
        self._names: List[str] = []

    def begin(self, module: nn.Module) -> None:
        """Forget what was added, and note which parameters are trained."""
        named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        self._names = [name for name, _ in named]
        self._parameters = [each for _, each in named]
        self._fold = Fold(self._ranks, self._ranks.block(self._rank))
        # Rows: some virtual rank has a gradient, some virtual rank has none.
        self._seen = torch.zeros(2, len(named), dtype=torch.int64)

    def add(self, gradients: Sequence[Optional[torch.Tensor]]) -> None:
        """Add the gradients of the block's next virtual rank, in the order of the parameters.

        They belong to this object from now on, which changes them in place.

        Raises:
            VirtualRanksError: If one is sparse.
        """
        for index, each in enumerate(gradients):
            if each is not None and each.is_sparse:
                raise VirtualRanksError(
                    f'the gradient of {self._names[index]} is sparse, and only dense ones are '
                    f'added up over virtual ranks: set sparse=False in the embedding, or start '
                    f"{self._ranks.count} processes with env_cfg.reduction='native'.")
            self._seen[int(each is None), index] = 1
        self._fold.add([torch.zeros_like(parameter) if each is None else each
                        for parameter, each in zip(self._parameters, gradients)])

    def finish(self) -> List[Optional[torch.Tensor]]:
        """Return the mean gradients, None where no virtual rank has one. Collective.

        Raises:
            VirtualRanksError: On all ranks, if a gradient is missing that may not be.
        """
        partials = self._fold.partials()
        del self._fold
        self._channel.max(self._seen)
        has, lacks = self._seen.bool()
        if not self._may_miss and lacks.any():
            self._refuse(lacks)
        present = has.nonzero()[:, 0].tolist()
        means: List[Optional[torch.Tensor]] = [None] * len(has)
        for bucket in _buckets([partials[0][index] for index in present]):
            indices = [present[position] for position in bucket]
            for index, mean in zip(indices, self._mean([[each[index] for index in indices]
                                                        for each in partials])):
                means[index] = mean
        return means

    def _mean(self, partials: List[List[torch.Tensor]]) -> List[torch.Tensor]:
        """Return the means over all virtual ranks, in the memory of the first partial sums."""
        first = partials[0]
        with torch.no_grad():
            if self._ranks.processes > 1:
                total = self._sum.sum([_flat(each) for each in partials])
                for each, part in zip(first, total.split([each.numel() for each in first])):
                    each.copy_(part.view(each.shape))
            for each in first:
                each.div_(self._ranks.count)
        return first

    def _refuse(self, lacks: torch.Tensor) -> None:
        names = [self._names[index] for index in lacks.nonzero()[:, 0].tolist()]
        shown = ', '.join(names[:5]) + (f' and {len(names) - 5} more' if len(names) > 5 else '')
        raise VirtualRanksError(
            f'{len(names)} parameter(s) got no gradient in a virtual rank: {shown}. Expected one '
            f'in each of the {self._ranks.count}, as under DistributedDataParallel. If parts of '
            f'the model take no part in some losses, set find_unused_parameters=True in the '
            f'config; if they never do, freeze them (requires_grad=False) or remove them.')


class _NativeSum:
    """The backend's own sum over processes, in the place of an :class:`OrderedSum`."""

    def sum(self, partials: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum over all processes of the sum of ``partials``. Collective."""
        total = partials[0]
        for each in partials[1:]:
            total = total + each
        # gloo of some versions lacks bfloat16
        wide = total.float() if total.device.type == 'cpu' and total.dtype == torch.bfloat16 \
            else total
        dist.all_reduce(wide)
        return wide.to(total.dtype)


def _flat(tensors: List[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def _buckets(tensors: List[torch.Tensor]) -> List[List[int]]:
    """Return the positions of tensors that are added up together: of one dtype, 25 MiB at most."""
    buckets: List[List[int]] = []
    size: Any = 0
    for position, each in enumerate(tensors):
        length = each.numel() * each.element_size()
        joins = buckets and size + length <= _BUCKET_BYTES \
            and tensors[buckets[-1][0]].dtype == each.dtype
        if not joins:
            buckets.append([])
            size = 0
        buckets[-1].append(position)
        size += length
    return buckets
