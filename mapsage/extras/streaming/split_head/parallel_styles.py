"""Split single modules of a head over the ranks of a replica. Needs torch >= 2.7.

Between modules every rank holds the whole activations, equal on all ranks. So norms, resizing and
the loss need no change. Only between the layers of an MLP are the activations split.
"""

from __future__ import annotations

from typing import Any, Callable, Tuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


def split_parameter(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Replace a parameter by this rank's rows of it. Collective.

    Group rank 0 provides the values.

    Args:
        module: Module that has the parameter.
        name: Name of the parameter, which may be None.
        mesh: One-dimensional mesh of the ranks of the replica.
    """
    parameter = getattr(module, name)
    if parameter is not None:
        rows = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        module.register_parameter(name, nn.Parameter(rows, parameter.requires_grad))


def show_plain(module: nn.Module, child: str, plain: Callable[[Any], torch.Tensor]) -> None:
    """Replace a module's split parameters by plain tensors, until :func:`hide_plain` is called.

    The module's forward code knows nothing of DTensor, and convolutions of DTensors are not
    implemented for split channels. Gradients reach the split parameters.

    Args:
        module: Module that is about to run.
        child: Name of the child whose parameters are split; empty for ``module`` itself.
        plain: Function that makes a plain tensor of a split parameter.
    """
    owner = module.get_submodule(child)
    split = list(owner.named_parameters(recurse=False))
    # Stored on the module and not in a hook, because a copy of a module shares the hooks of the
    # original.
    module.__dict__['_split_parameters'] = (owner, split)
    for name, parameter in split:
        delattr(owner, name)
        # This bypasses nn.Module.__setattr__, which would register the result of to_local as a
        # parameter.
        object.__setattr__(owner, name, plain(parameter))


def hide_plain(module: nn.Module) -> None:
    """Put the split parameters back in their original order."""
    owner, split = module.__dict__.pop('_split_parameters', (module, []))
    for name, parameter in split:
        delattr(owner, name)
        owner.register_parameter(name, parameter)


def into_shares(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return ``x``, which is equal on all ranks, with gradients that are summed over the ranks."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(
        grad_placements=[Partial()]
    )


def gather_channels(x: torch.Tensor, channels: int, mesh: DeviceMesh) -> torch.Tensor:
    """Return the channels of all ranks together, (n, channels, ...), on every rank."""
    shape = (x.shape[0], channels) + tuple(x.shape[2:])
    stride = torch.empty(shape, device='meta').stride()
    split = DTensor.from_local(
        x.contiguous(), mesh, [Shard(1)], run_check=False, shape=torch.Size(shape), stride=stride
    )
    return split.redistribute(mesh, [Replicate()]).to_local()


class SplitConv2d(ParallelStyle):
    """Each rank computes a share of a convolution's output channels, and all ranks gather them.

    The shares need not be of equal size.
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
            # After an error in the forward code there is no output.
            return None if output is None else gather_channels(output, channels, device_mesh)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


class GatherQkv(ParallelStyle):
    """Each rank keeps a share of an attention's ``qkv`` weights and gathers them while it runs.

    This is for an attention that multiplies by ``qkv.weight`` itself, such as DINOv3's. The memory
    is split; the multiplication is not.
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
