"""Mean of the gradients over all virtual ranks, computed after the backward passes of a step.

Used by `virtual_parallel.py`. Unlike DDP, which averages buckets during one backward pass, it adds
up the gradients of one virtual rank after the other first, and then over the processes. The order
of the additions is in ``mapsage/distributed/ordered_sum.py``.
"""

from __future__ import annotations

from typing import List, Optional, Sequence

import torch
import torch.distributed as dist
from torch import nn

from mapsage.distributed import open_channel
from mapsage.distributed.ordered_sum import Fold, OrderedSum
from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError

# DDP's default, bucket_cap_mb.
_BUCKET_BYTES = 25 * 2**20


class GradientMean:
    """Adds up the gradients of the virtual ranks and divides the sum by their number.

    Args:
        ranks: Virtual ranks of the run.
        rank: Rank of this process.
        reduction: ``'ordered'``, or ``'native'`` for the backend's own sum over processes.
        may_miss: Whether some or all virtual ranks may have no gradient for a parameter. A missing
            gradient counts as zeros if another virtual rank has one, as under DDP.
    """

    def __init__(self, ranks: VirtualRanks, rank: int, reduction: str, may_miss: bool) -> None:
        self._ranks, self._rank = ranks, rank
        self._may_miss = may_miss
        self._sum = _NativeSum() if reduction == 'native' else OrderedSum(ranks, rank)
        self._channel = open_channel(purpose='gradients')
        self._parameters: List[nn.Parameter] = []
        self._names: List[str] = []

    def begin(self, module: nn.Module) -> None:
        """Start a new sum, over the parameters that are trained now."""
        trained = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]
        self._names = [name for name, _ in trained]
        self._parameters = [parameter for _, parameter in trained]
        self._fold = Fold(self._ranks, self._ranks.block(self._rank))
        # (2, parameters): 1 if a virtual rank has a gradient, 1 if a virtual rank has none.
        self._seen = torch.zeros(2, len(trained), dtype=torch.int64)

    def add(self, gradients: Sequence[Optional[torch.Tensor]]) -> None:
        """Add the gradients of the block's next virtual rank.

        Args:
            gradients: Gradients in the order of the trained parameters. The caller gives them up,
                because they are changed in place.

        Raises:
            VirtualRanksError: If a gradient is sparse.
        """
        for index, gradient in enumerate(gradients):
            if gradient is not None and gradient.is_sparse:
                raise VirtualRanksError(
                    f'the gradient of {self._names[index]} is sparse, and only dense ones are '
                    f'added up over virtual ranks: set sparse=False in the embedding, or start '
                    f"{self._ranks.count} processes with env_cfg.reduction='native'."
                )
            self._seen[int(gradient is None), index] = 1
        self._fold.add(
            [
                torch.zeros_like(parameter) if gradient is None else gradient
                for parameter, gradient in zip(self._parameters, gradients)
            ]
        )

    def finish(self) -> List[Optional[torch.Tensor]]:
        """Return the mean gradients, None where no virtual rank has one. Collective.

        Raises:
            VirtualRanksError: On all ranks, if a gradient is missing and ``may_miss`` is False.
        """
        partials = self._fold.partials()
        del self._fold
        self._channel.max(self._seen)
        has_gradient, lacks_gradient = self._seen.bool()
        if not self._may_miss and lacks_gradient.any():
            self._refuse(lacks_gradient)
        present = has_gradient.nonzero()[:, 0].tolist()
        means: List[Optional[torch.Tensor]] = [None] * len(has_gradient)
        for bucket in _divide_into_buckets([partials[0][index] for index in present]):
            indices = [present[position] for position in bucket]
            bucket_means = self._mean(
                [[partial[index] for index in indices] for partial in partials]
            )
            for index, mean in zip(indices, bucket_means):
                means[index] = mean
        return means

    def _mean(self, partials: List[List[torch.Tensor]]) -> List[torch.Tensor]:
        """Return the means over all virtual ranks, in the memory of the first partial sums."""
        sums = partials[0]
        with torch.no_grad():
            if self._ranks.processes > 1:
                total = self._sum.sum([_flatten(partial) for partial in partials])
                values = total.split([tensor.numel() for tensor in sums])
                for tensor, tensor_values in zip(sums, values):
                    tensor.copy_(tensor_values.view(tensor.shape))
            for tensor in sums:
                tensor.div_(self._ranks.count)
        return sums

    def _refuse(self, lacks_gradient: torch.Tensor) -> None:
        names = [self._names[index] for index in lacks_gradient.nonzero()[:, 0].tolist()]
        shown = ', '.join(names[:5]) + (f' and {len(names) - 5} more' if len(names) > 5 else '')
        raise VirtualRanksError(
            f'{len(names)} parameter(s) got no gradient in a virtual rank: {shown}. Expected one '
            f'in each of the {self._ranks.count}, as under DistributedDataParallel. If parts of '
            f'the model take no part in some losses, set find_unused_parameters=True in the '
            f'config; if they never do, freeze them (requires_grad=False) or remove them.'
        )


class _NativeSum:
    """The backend's own sum over processes, with the interface of :class:`OrderedSum`."""

    def sum(self, partials: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum over all processes of the sum of ``partials``. Collective."""
        total = partials[0]
        for partial in partials[1:]:
            total = total + partial
        # gloo of some versions lacks bfloat16.
        wide = (
            total.float() if total.device.type == 'cpu' and total.dtype == torch.bfloat16 else total
        )
        dist.all_reduce(wide)
        return wide.to(total.dtype)


def _flatten(tensors: List[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _divide_into_buckets(tensors: List[torch.Tensor]) -> List[List[int]]:
    """Return the indices of tensors that travel together: neighbors of one dtype, up to 25 MiB."""
    buckets: List[List[int]] = []
    bucket_bytes = 0
    for index, tensor in enumerate(tensors):
        tensor_bytes = tensor.numel() * tensor.element_size()
        joins = (
            buckets
            and bucket_bytes + tensor_bytes <= _BUCKET_BYTES
            and tensors[buckets[-1][0]].dtype == tensor.dtype
        )
        if not joins:
            buckets.append([])
            bucket_bytes = 0
        buckets[-1].append(index)
        bucket_bytes += tensor_bytes
    return buckets
