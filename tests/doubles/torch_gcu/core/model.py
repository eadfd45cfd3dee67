"""``torch_gcu.core.model``: running what the lazy device has recorded."""

from __future__ import annotations

import enum
from typing import Any, List

import _XLAC
import torch
import torch_xla.core.xla_model as xm

from .device import check_index, device_index


class JitRunMode(enum.Enum):
    """SYNC waits for the graph, ASYNC does not, SAFEASYNC waits for the one before."""

    SYNC = 0
    ASYNC = 1
    SAFEASYNC = 2


def _check_type(thing: Any, kind: type) -> None:
    if not isinstance(thing, kind):
        raise TypeError(f'Param must be {kind}, got {type(thing)}')


def _on_gcu(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor) and thing.device.type == 'xla'


def _all_on_gcu(things: Any) -> bool:
    return isinstance(things, (list, tuple)) and all(map(_on_gcu, things))


def synchronize(device: Any = None) -> None:
    check_index(device_index(device, optional=True))
    xm.wait_device_ops()


def unlazy(tensors: Any, mode: JitRunMode = JitRunMode.SAFEASYNC) -> None:
    """Run the graph of these tensors only."""
    if not _all_on_gcu(tensors):
        raise TypeError('Tensors must be a list of GCU tensor.')
    _XLAC._xla_sync_multi(list(tensors), devices=[], wait=mode is JitRunMode.SYNC)


def sync_lived_tensor(device: Any = None, mode: JitRunMode = JitRunMode.SAFEASYNC) -> None:
    """Run the graph of every tensor that is alive."""
    index = device_index(device, optional=True)
    check_index(index)
    _XLAC._xla_step_marker(f'xla:{index}', [], wait=mode is JitRunMode.SYNC)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    extra_output: Any = None,
    optimizer_args: Any = {},  # noqa: B006 (the real signature)
    model: Any = None,
    mode: JitRunMode = JitRunMode.SAFEASYNC,
    device: Any = None,
) -> Any:
    """Step and run the graph. Trap: unlike torch_xla's, gradients are *not* reduced here.

    Without ``model`` every live tensor is an output; with it, its buffers, the optimizer's
    parameters and state, and ``extra_output``, which is dropped in silence when a part of it is
    not on the device.
    """
    _check_type(optimizer, torch.optim.Optimizer)
    loss = optimizer.step(**optimizer_args)
    if model is None:
        sync_lived_tensor(device, mode)
        return loss
    _check_type(model, torch.nn.Module)
    outputs = _parameters_and_state(optimizer) + collect_buffers(model)
    if _on_gcu(extra_output):
        outputs.append(extra_output)
    elif _all_on_gcu(extra_output):
        outputs.extend(extra_output)
    unlazy(outputs, mode)
    return loss


def collect_buffers(model: torch.nn.Module) -> List[torch.Tensor]:
    _check_type(model, torch.nn.Module)
    return [buffer.data for buffer in model.buffers()]


def collect_amp_training_params(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: Any
) -> List[torch.Tensor]:
    from torch_gcu.amp import GradScaler

    _check_type(scaler, GradScaler)
    return (
        _parameters_and_state(optimizer)
        + collect_buffers(model)
        + [scaler._scale, scaler._growth_tracker]
    )


def fetch_gradients(optimizer: torch.optim.Optimizer) -> List[torch.Tensor]:
    _check_type(optimizer, torch.optim.Optimizer)
    return [
        parameter.grad.data
        for group in optimizer.param_groups
        for parameter in group['params']
        if parameter.grad is not None
    ]


def clear_graph_caches() -> None:
    return


def _parameters_and_state(optimizer: torch.optim.Optimizer) -> List[torch.Tensor]:
    found = []
    for group in optimizer.param_groups:
        for parameter in group['params']:
            found.append(parameter.data)
            found += [each for each in optimizer.state[parameter].values() if _on_gcu(each)]
    return found
