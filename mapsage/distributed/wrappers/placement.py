"""Moves a model to the device of its rank, and checks that everything arrived.

``module.to(device)`` is not enough: some devices break the tie between shared parameters, some have
no SyncBatchNorm, and a module may override ``to()``. The wrappers of this package call
:func:`place_module` first; a model that is split over devices is placed by `model_parallel.py`.
"""

from __future__ import annotations

from typing import Dict, List, Tuple

import torch
from mmengine.logging import print_log
from mmengine.model import revert_sync_batchnorm
from torch import nn

from mapsage.accelerator import Accelerator
from mapsage.base.errors import UserError


class PlacementError(UserError, RuntimeError):
    """A parameter or buffer is not on the device of its rank."""


def place_module(module: nn.Module, accelerator: Accelerator, local_rank: int) -> nn.Module:
    """Return ``module`` on this rank's device, without SyncBN if the device lacks it.

    Raises:
        PlacementError: If a parameter or buffer did not reach the device.
    """
    if not accelerator.supports.sync_bn and has_sync_batchnorm(module):
        print_log(
            f'SyncBatchNorm does not compute on {accelerator.name}: every rank normalizes with its '
            f'own statistics (BatchNorm). Small batches may want GroupNorm.',
            logger='current',
            level=30,
        )
        module = revert_sync_batchnorm(module)
    device = accelerator.device(local_rank)
    ties = find_tied_parameters(module)
    module = module.to(device)
    restore_ties(ties)
    stray = [
        f'{name} on {tensor.device}'
        for name, tensor in named_tensors(module).items()
        if tensor.device != device
        and not (device.index is None and tensor.device.type == device.type)
    ]
    if stray:
        raise PlacementError(
            f'{len(stray)} tensor(s) of {type(module).__name__} did not reach {device}: '
            f'{", ".join(stray[:3])}. A module that pins its own device or overrides .to() or '
            f'_apply() must leave placement to the caller.'
        )
    return module


def has_sync_batchnorm(module: nn.Module) -> bool:
    """Return whether a module has layers that normalize over all ranks."""
    # By name, because the SyncBatchNorm of mmcv exists only where its ops are compiled.
    return any('SyncBatchNorm' in type(child).__name__ for child in module.modules())


def named_tensors(module: nn.Module) -> Dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def find_tied_parameters(module: nn.Module) -> List[List[Tuple[nn.Module, str]]]:
    """Return, for each parameter that several modules share, these modules and its names there.

    Not every device keeps a parameter shared when it is moved; see :func:`restore_ties`.
    """
    owners: Dict[int, List[Tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((owner, name))
    return [sharers for sharers in owners.values() if len(sharers) > 1]


def restore_ties(ties: List[List[Tuple[nn.Module, str]]]) -> None:
    """Give the modules of :func:`find_tied_parameters` one parameter again, after a move."""
    for (first_owner, first_name), *sharers in ties:
        for owner, name in sharers:
            # setattr, because recurrent layers refresh their list of flat weights in it.
            setattr(owner, name, first_owner.get_parameter(first_name))
