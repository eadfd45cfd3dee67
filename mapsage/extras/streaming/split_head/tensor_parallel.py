"""Splits the weights of a head over the ranks of a head replica, with torch's tensor parallelism.

Each module type has a style in `parallel_styles.py`. Between modules every rank holds the whole
activations, so only the weights, their gradients and the optimizer's state become smaller. Needs
torch 2.7.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence, Tuple, Union

import torch
import torch.distributed as dist
from torch import nn

from mapsage.accelerator import current_accelerator
from mapsage.base.errors import UserError
from mapsage.distributed import open_channel

# The oldest torch whose distribute_tensor takes src_data_rank.
TORCH = (2, 7)


class TensorParallelError(UserError, ValueError):
    """A head cannot be split; the message says why and what to do."""


class SplitHead:
    """Operations on the whole of a head that :func:`parallelize_head` has split.

    Attributes:
        head: Module that was split; each rank holds its shares of it.
        mesh: Ranks of the replica, a ``DeviceMesh`` of one dimension.
        plan: ``ParallelStyle`` of each split module, by the module's name. Modules that are not in
            it are whole.

    Args:
        head: Module that was split.
        mesh: Ranks of the replica.
        plan: Styles that were applied.
        shapes: Shapes of the values in the head's state dict before it was split.
    """

    def __init__(
        self, head: nn.Module, mesh: Any, plan: Mapping[str, Any], shapes: Mapping[str, torch.Size]
    ) -> None:
        self.head, self.mesh, self.plan, self._shapes = head, mesh, dict(plan), dict(shapes)

    def gather_state_dict(self) -> Dict[str, torch.Tensor]:
        """Return the state dict that the head would have in one piece. Collective.

        Returns:
            Copies in host memory, equal on every rank.
        """
        state = {}
        for name, value in self._state():
            whole = value.full_tensor() if _is_split(value) else value
            state[name] = whole.detach().cpu().clone()
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a state dict of the head in one piece; every rank takes its shares.

        Args:
            state: State dict of the whole head, equal on every rank.

        Raises:
            TensorParallelError: If names or shapes differ from the head's. Nothing is changed.
        """
        wrong = [
            f'{name}: {tuple(state[name].shape)}, expected {tuple(shape)}'
            for name, shape in self._shapes.items()
            if name in state and state[name].shape != shape
        ]
        missing, unknown = set(self._shapes) - set(state), set(state) - set(self._shapes)
        if missing or unknown or wrong:
            raise TensorParallelError(
                f'the state dict is not that of this head: missing {sorted(missing)}, unknown '
                f'{sorted(unknown)}, of other shapes {wrong}. Use one that a head of the same '
                f'config has on one rank, or that gather_state_dict returned.'
            )
        from torch.distributed.tensor import distribute_tensor

        with torch.no_grad():
            for name, value in self._state():
                plain = state[name].to(value.device)
                if _is_split(value):
                    plain = distribute_tensor(
                        plain, self.mesh, value.placements, src_data_rank=None
                    ).to_local()
                    value = value.to_local()
                value.copy_(plain)

    def _state(self) -> List[Tuple[str, Any]]:
        return list(self.head.state_dict().items())

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the gradients so that their L2 norm over the whole head is at most ``max_norm``.

        Collective. ``torch.nn.utils.clip_grad_norm_`` would take each share for the whole gradient.

        Args:
            max_norm: Largest norm, positive.

        Returns:
            Norm before the scaling, equal on every rank.
        """
        grads: List[Any] = [
            parameter.grad for parameter in self.head.parameters() if parameter.grad is not None
        ]
        shares: List[torch.Tensor] = []
        whole: List[torch.Tensor] = []
        for grad in grads:
            (shares if is_share(grad) else whole).append(
                grad.to_local() if _is_split(grad) else grad
            )
        return scale_to_norm(shares, whole, self.mesh.get_group(), max_norm)


def scale_to_norm(
    shares: Sequence[torch.Tensor],
    whole: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    max_norm: float,
) -> float:
    """Scale gradients in place so that the L2 norm of all of them together is at most ``max_norm``.

    Collective over the replica. At least one tensor must be given.

    Args:
        shares: This rank's parts of the gradients that are split over the ranks, plain tensors.
        whole: Gradients that every rank holds, equal on all ranks.
        group: Process group of the replica.
        max_norm: Largest norm, positive.

    Returns:
        Norm before the scaling, equal on every rank.
    """
    channel = open_channel(group, purpose='gradient norm')
    # In host memory, because a card may neither have float64 nor add it over ranks.
    squares = torch.stack(channel.gather(_sum_squares(shares))).sum() + _sum_squares(whole)
    norm = float(squares.sqrt())
    # The formula of torch's clip_grad_norm_.
    scale = max_norm / (norm + 1e-6)
    # Also true for NaN, which then spreads to all gradients, as in torch.
    if not scale >= 1:
        for grad in [*shares, *whole]:
            grad.mul_(scale)
    return norm


def _sum_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the squares of all elements, a float64 scalar in host memory."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    wide = torch.float64 if current_accelerator().supports.float64 else torch.float32
    sums = torch.stack([tensor.to(wide).square().sum() for tensor in tensors])
    return sums.cpu().double().sum()


def parallelize_head(head: nn.Module, ranks: Union[dist.ProcessGroup, Any]) -> SplitHead:
    """Split a head in place over the ranks of its replica. Collective; needs torch >= 2.7.

    Convolutions and linear layers are split by output channels, and the channels of all ranks are
    gathered after each of these layers. An MLP that consists of linear layers only needs one sum
    over the ranks instead. An attention like DINOv3's keeps a share of its ``qkv`` on each rank and
    gathers it while it runs. Grouped and transposed convolutions, norms, and layers with fewer
    output channels than ranks stay whole.

    All ranks begin with the weights of the first one. They must then train on the same features
    and labels. The gradients of modules that stay whole are equal on all ranks.

    Dropout and stochastic depth act on whole activations, so their random numbers must be equal on
    all ranks: give the device's generator the same seed on all ranks of a replica before each step.

    Call this before the optimizer is made, or pass the optimizer to
    :class:`~mapsage.extras.streaming.split_head.trained_shares.TrainedShares`.

    Args:
        head: Head to split, on the devices of ``ranks``: the CPU for gloo, CUDA for nccl.
        ranks: Process group of the replica, or a DeviceMesh of one dimension.

    Returns:
        An object that gathers, loads and clips the head as a whole. The head itself is trained as
        before.

    Raises:
        RuntimeError: If this torch has no tensor parallelism.
        TensorParallelError: If the head is on another device than the ranks' mesh.
    """
    check_torch()
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    device = _device_type(head)
    mesh = ranks if isinstance(ranks, DeviceMesh) else DeviceMesh.from_group(ranks, device)
    if mesh.device_type != device or mesh.ndim != 1:
        raise TensorParallelError(
            f'the head is on {device!r}, and the mesh has {mesh.ndim} dimension(s) of '
            f'{mesh.device_type!r}: expected one dimension and the same device. Move the head '
            f'first, and slice the mesh.'
        )
    shapes = {name: value.shape for name, value in head.state_dict().items()}
    if mesh.size() == 1:
        return SplitHead(head, mesh, {}, shapes)
    plan = plan_of(head, mesh.size())
    for tensor in [*head.parameters(), *head.buffers()]:
        tensor.data.copy_(distribute_tensor(tensor.data, mesh, [Replicate()]).to_local())
    parallelize_module(head, mesh, plan)
    return SplitHead(head, mesh, plan, shapes)


def check_torch() -> None:
    """Raise ``RuntimeError`` unless this torch can split a head."""
    version = tuple(map(int, torch.__version__.split('+')[0].split('.')[:2]))
    if version < TORCH:
        raise RuntimeError(
            f'a head replica of several ranks needs torch.distributed.tensor.parallel of torch >= '
            f'{TORCH[0]}.{TORCH[1]}, and this is torch {torch.__version__}. Use replicas of one '
            f'rank here (ranks_per_head=1), or a newer torch.'
        )


def plan_of(head: nn.Module, ranks: int) -> Dict[str, Any]:
    """Return how the modules of a head are split over ``ranks`` ranks. Pure.

    Returns:
        A ``ParallelStyle`` for each split module, by the module's name.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from .parallel_styles import GatherQkv, SplitConv2d

    plan: Dict[str, Any] = {}
    for name, module in head.named_modules():
        prefix = f'{name}.' if name else ''
        if _reads_qkv(module):
            plan[name] = GatherQkv()
        *inner, last = _mlp_layers(module) or ['']
        if inner and all(module.get_submodule(layer).out_features % ranks == 0 for layer in inner):
            plan.update({f'{prefix}{layer}': ColwiseParallel() for layer in inner})
            plan[f'{prefix}{last}'] = RowwiseParallel()
    within = {f'{name}.qkv' for name, style in plan.items() if isinstance(style, GatherQkv)}
    for name, module in head.named_modules():
        if name in plan or name in within:
            continue
        if (
            isinstance(module, nn.Conv2d)
            and module.groups == 1
            and _all_have_some(module.out_channels, ranks)
        ):
            plan[name] = SplitConv2d()
        # Subclasses are left whole: nn.MultiheadAttention reads the weights of one directly,
        # without calling it.
        elif type(module) is nn.Linear and _all_have_some(module.out_features, ranks):
            plan[name] = ColwiseParallel(output_layouts=Replicate())
    return plan


def _all_have_some(channels: int, ranks: int) -> bool:
    """Return whether every rank gets a channel. The size of a share is rounded up."""
    return -(-channels // ranks) * (ranks - 1) < channels


def _reads_qkv(module: nn.Module) -> bool:
    """Return whether a module is an attention like DINOv3's, which does not call its ``qkv``."""
    return isinstance(getattr(module, 'qkv', None), nn.Linear) and all(
        hasattr(module, name) for name in ('proj', 'num_heads', 'has_bias')
    )


def _mlp_layers(module: nn.Module) -> List[str]:
    """Return the names of an MLP's layers in order; empty unless all of them are linear layers."""
    names = [name for name, _ in module.named_children()]
    return (
        names
        if names in (['fc1', 'fc2'], ['w1', 'w2', 'w3'])
        and all(type(layer) is nn.Linear for layer in module.children())
        else []
    )


def _device_type(head: nn.Module) -> str:
    kinds = {parameter.device.type for parameter in head.parameters()}
    if len(kinds) != 1:
        raise TensorParallelError(
            f'the parameters of the head are on {sorted(kinds)}, expected '
            f'one kind of device. Move the head there first.'
        )
    return kinds.pop()


def is_share(value: Any) -> bool:
    """Return whether a parameter or gradient is split, so that each rank holds a part of it."""
    return _is_split(value) and any(placement.is_shard() for placement in value.placements)


def _is_split(value: object) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)
