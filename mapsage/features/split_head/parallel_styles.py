"""How single modules of a head are split over the ranks of a replica. Needs torch >= 2.7.

Between the modules every rank holds the whole activations, equal on all ranks, so that what is not
split (norms, resizing, the loss) needs no change. Only inside an MLP it is otherwise.
"""
from __future__ import annotations

from typing import Any, Callable, Tuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


def split_parameter(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Keep only this rank's rows of a parameter, as group rank 0 has it. Collective.

    Args:
        module: Which has the parameter.
        name: The parameter; one that is None stays.
        mesh: One dimension, the ranks of the replica.
    """
    parameter = getattr(module, name)
    if parameter is not None:
        rows = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        module.register_parameter(name, nn.Parameter(rows, parameter.requires_grad))


def show_plain(module: nn.Module, child: str, plain: Callable[[Any], torch.Tensor]) -> None:
    """Show a module plain tensors in place of its split parameters, until :func:`hide_plain`.

    Its forward code knows nothing of DTensor, and convolutions of DTensors are not implemented for
    split channels. Gradients reach the parameters.

    Args:
        module: Which will run.
        child: Whose parameters are split; empty for the module's own.
        plain: Makes a plain tensor of a split parameter.
    """
    owner = getattr(module, child) if child else module
    split = list(owner.named_parameters(recurse=False))
    # on the module and not in a hook: a copy of a module has the hooks of the first
    module.__dict__['_split_parameters'] = (owner, split)
    for name, parameter in split:
        delattr(owner, name)
        # past nn.Module, which takes what to_local returns for a parameter
        object.__setattr__(owner, name, plain(parameter))


def hide_plain(module: nn.Module) -> None:
    """Put the split parameters back, in their order."""
    owner, split = module.__dict__.pop('_split_parameters', (module, []))
    for name, parameter in split:
        delattr(owner, name)
        owner.register_parameter(name, parameter)


def into_shares(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return ``x``, equal on all ranks; its gradients are summed over them."""
    return DTensor.from_local(x, mesh, [Replicate()],
                              run_check=False).to_local(grad_placements=[Partial()])


def gather_channels(x: torch.Tensor, channels: int, mesh: DeviceMesh) -> torch.Tensor:
    """Return the shares of all ranks, (n, channels, ...), on every rank."""
    shape = (x.shape[0], channels) + tuple(x.shape[2:])
    stride = torch.empty(shape, device='meta').stride()
    split = DTensor.from_local(x.contiguous(), mesh, [Shard(1)], run_check=False,
                               shape=torch.Size(shape), stride=stride)
    return split.redistribute(mesh, [Replicate()]).to_local()


class SplitConv2d(ParallelStyle):
    """Each rank computes a share of a convolution's output channels; these are gathered.

    The shares need not be equal.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Conv2d)
        channels = module.out_channels
        split_parameter(module, 'weight', device_mesh)
        split_parameter(module, 'bias', device_mesh)

        def enter(module: nn.Module, args: Tuple[Any, ...]) -> Tuple[Any, ...]:
            entered = into_shares(args[0], device_mesh)
            show_plain(module, '', lambda parameter: parameter.to_local())
            return (entered, *args[1:])

        def leave(module: nn.Module, args: Tuple[Any, ...], output: Any) -> Any:
            hide_plain(module)
            # None where forward raised
            return None if output is None else gather_channels(output, channels, device_mesh)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


class GatherQkv(ParallelStyle):
    """Each rank keeps a share of an attention's ``qkv`` weights, gathered while it runs.

    For an attention that multiplies by ``qkv.weight`` itself, as DINOv3's. Memory is split; the
    multiplication is not.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module.qkv, nn.Linear)
        split_parameter(module.qkv, 'weight', device_mesh)
        split_parameter(module.qkv, 'bias', device_mesh)

        def enter(module: nn.Module, args: Tuple[Any, ...]) -> None:
            show_plain(module, 'qkv', lambda parameter: parameter.full_tensor())

        def leave(module: nn.Module, args: Tuple[Any, ...], output: Any) -> None:
            hide_plain(module)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module
