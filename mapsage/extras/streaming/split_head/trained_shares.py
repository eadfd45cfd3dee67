"""A split head in training: the parameters of the optimizer, and the content of a checkpoint.

The optimizer gets this rank's shares as plain tensors, which use the same memory as the split
parameters. An optimizer that works element by element then computes the same as on the whole head,
and gradient scalers and fused steps never see a DTensor.
"""

from __future__ import annotations

import copy
from typing import Any, Dict, List, Tuple

import torch
import torch.distributed as dist
from torch import nn

from .tensor_parallel import TensorParallelError, is_share, parallelize_head, scale_to_norm

# Optimizers of torch.optim that update each element on its own.
_ELEMENTWISE = (
    'ASGD',
    'Adadelta',
    'Adagrad',
    'Adam',
    'AdamW',
    'Adamax',
    'NAdam',
    'RAdam',
    'RMSprop',
    'Rprop',
    'SGD',
)


class TrainedShares:
    """Splits a head and the state of its optimizer over the ranks of a replica. Collective.

    Head and optimizer may have been loaded from a checkpoint before. Every rank then takes its
    shares of the weights and of the optimizer's state.

    Args:
        head: Whole head, on this rank's device, with the same weights on all ranks.
        group: Process group of the replica.
        optimizer: Optimizer that updates the parameters of the head, among others.

    Attributes:
        head: The same module, with split parameters.

    Raises:
        RuntimeError: If this torch has no tensor parallelism.
        TensorParallelError: If the optimizer does not work element by element, or the head is not
            on one device.
    """

    def __init__(
        self, head: nn.Module, group: dist.ProcessGroup, optimizer: torch.optim.Optimizer
    ) -> None:
        kind = type(optimizer)
        if kind.__name__ not in _ELEMENTWISE or not kind.__module__.startswith('torch.optim'):
            raise TensorParallelError(
                f'the optimizer is {kind.__name__}, expected one that updates each element by '
                f'itself: {", ".join(_ELEMENTWISE)} of torch.optim. Each rank of a head replica '
                f'updates a part of each weight. Use one of these, or ranks_per_head=1.'
            )
        whole = dict(head.named_parameters())
        self._assembled = copy.deepcopy(head).cpu()
        self.head = head
        self._split = parallelize_head(head, group)
        self._group = group
        # (split parameter, its local part)
        self._shares: List[Tuple[Any, nn.Parameter]] = []
        share_of: Dict[nn.Parameter, nn.Parameter] = {}
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                if parameter is not whole[name]:
                    local: Any = parameter.to_local()  # type: ignore[attr-defined]
                    share = nn.Parameter(local.detach(), parameter.requires_grad)
                    self._shares.append((parameter, share))
                    share_of[whole[name]] = share
            self._hand_over(optimizer, share_of)

    def parameters_of(
        self, optimizer: torch.optim.Optimizer
    ) -> Tuple[List[nn.Parameter], List[nn.Parameter]]:
        """Return what ``optimizer`` trains: this rank's shares, and the whole parameters."""
        split = {id(share) for parameter, share in self._shares if is_share(parameter)}
        trained = [
            parameter
            for group in optimizer.param_groups
            for parameter in group['params']
            if parameter.requires_grad
        ]
        return (
            [parameter for parameter in trained if id(parameter) in split],
            [parameter for parameter in trained if id(parameter) not in split],
        )

    def take_gradients(self) -> None:
        """Move the gradients of the last backward passes to where the optimizer looks for them."""
        for parameter, share in self._shares:
            grad, parameter.grad = parameter.grad, None
            if grad is None:
                continue
            if tuple(grad.placements) != tuple(parameter.placements):
                grad = grad.redistribute(placements=parameter.placements)
            share.grad = grad.to_local()

    def clip_grad_norm(
        self, parameters: List[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> float:
        """Clip like ``torch.nn.utils.clip_grad_norm_``, over the whole head. Collective.

        Args:
            parameters: Parameters of the optimizer, with gradients.
            max_norm: Largest norm, positive.
            norm_type: Type of the norm, which must be 2.

        Returns:
            Norm before the clipping, equal on every rank.

        Raises:
            TensorParallelError: If ``norm_type`` is not 2.
        """
        if float(norm_type) != 2:
            raise TensorParallelError(
                f'optim_wrapper.clip_grad.norm_type={norm_type!r}, expected 2: the gradients of a '
                f'head replica are clipped by their L2 norm. Use 2, or ranks_per_head=1.'
            )
        split = {id(share) for parameter, share in self._shares if is_share(parameter)}
        grads = [
            (parameter.grad, id(parameter) in split)
            for parameter in parameters
            if parameter.grad is not None
        ]
        return scale_to_norm(
            [grad for grad, is_split in grads if is_split],
            [grad for grad, is_split in grads if not is_split],
            self._group,
            max_norm,
        )

    def assemble(self) -> nn.Module:
        """Return a copy of the head in one piece, on the head's device. Collective.

        There is one such copy. :meth:`put_away` moves it back to host memory.
        """
        device = next(self.head.parameters()).device
        self._assembled.load_state_dict(self._split.gather_state_dict())
        return self._assembled.to(device).train(self.head.training)

    def put_away(self) -> None:
        """Move the copy of :meth:`assemble` to host memory."""
        self._assembled.cpu()

    def gather_optimizer_state(
        self, optimizer: torch.optim.Optimizer
    ) -> Dict[int, Dict[str, torch.Tensor]]:
        """Return the optimizer's state of each split parameter, in one piece. Collective.

        Returns:
            Tensors in host memory, by the parameter's number in ``optimizer.state_dict()`` and by
            the name of the value.
        """
        from torch.distributed.tensor import DTensor

        whole: Dict[int, Dict[str, torch.Tensor]] = {}
        numbers = {
            id(parameter): number
            for number, parameter in enumerate(
                parameter for group in optimizer.param_groups for parameter in group['params']
            )
        }
        for parameter, share in self._shares:
            for name, value in optimizer.state.get(share, {}).items():
                if not _is_like(value, share):
                    continue
                split = DTensor.from_local(
                    value,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                whole.setdefault(numbers[id(share)], {})[name] = split.full_tensor().cpu()
        return whole

    def _hand_over(
        self, optimizer: torch.optim.Optimizer, share_of: Dict[nn.Parameter, nn.Parameter]
    ) -> None:
        """Let the optimizer update the shares instead of the whole parameters."""
        from torch.distributed.tensor import distribute_tensor

        split_of = {id(share): parameter for parameter, share in self._shares}
        for group in optimizer.param_groups:
            group['params'] = [share_of.get(parameter, parameter) for parameter in group['params']]
        for old, share in share_of.items():
            parameter = split_of[id(share)]
            state = optimizer.state.pop(old, {})
            for name, value in state.items():
                if _is_like(value, old):
                    # Each rank cuts its share out of the state that all ranks have loaded.
                    state[name] = (
                        distribute_tensor(
                            value, parameter.device_mesh, parameter.placements, src_data_rank=None
                        )
                        .to_local()
                        .clone()
                    )
            if state:
                optimizer.state[share] = state


def _is_like(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape
