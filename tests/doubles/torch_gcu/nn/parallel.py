"""``torch_gcu.nn.parallel``: DDP that is no subclass of torch's."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, List, Optional

import torch
import torch_gcu
import torch_gcu.distributed as dist
from torch import nn


class DistributedDataParallel(nn.Module):
    """Averages gradients over the ranks of the eccl group in the backward pass.

    Traps: ``device_ids=None`` means every visible card, not this process's; the constructor's
    broadcast names rank -1 as the source and leaves each rank its own weights; gradients cannot be
    views of the buckets; communication hooks do not exist.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Optional[List[int]] = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        process_group: Any = None,
        bucket_cap_mb: int = 256,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        super().__init__()
        devices = {parameter.device.type for parameter in module.parameters()}
        assert any(parameter.requires_grad for parameter in module.parameters()), (
            "DistributedDataParallel is not needed when a module doesn't have any parameter that "
            'requires a gradient.'
        )
        assert len(devices) == 1, (
            f"DistributedDataParallel's input module must be on the same type of devices, but "
            f'input module parameters locate in {devices}.'
        )
        if devices == {'cpu'}:
            assert not device_ids and not output_device, (
                f'DistributedDataParallel device_ids and output_device arguments only work with '
                f'single-device GPU modules, but got device_ids {device_ids}, output_device '
                f'{output_device}, and module parameters {devices}.'
            )
        elif device_ids is None:
            device_ids = list(range(torch_gcu.device_count()))
            if len(device_ids) > 1:
                # The real one continues to put a replica of the module on each of them.
                raise RuntimeError(
                    f'device_ids=None: this process would take the cards '
                    f'{device_ids}, and it holds one'
                )
        elif len(device_ids) > 1:
            raise RuntimeError('device_ids can only be None or contain a single element.')
        if gradient_as_bucket_view:
            raise RuntimeError(
                'dtu not support `gradient_as_bucket_view` set to True'
                'please set gradient_as_bucket_view to False'
            )
        self.module, self.device_ids = module, device_ids
        self.device = torch_gcu.gcu_device(device_ids[0]) if device_ids else torch.device('cpu')
        self.process_group = process_group or dist.distributed_c10d._default()
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.require_backward_grad_sync = True
        self._armed = False
        self._parameters_to_reduce = [each for each in module.parameters() if each.requires_grad]
        for parameter in self._parameters_to_reduce:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._armed = True
            if self.broadcast_buffers:
                for buffer in self.module.buffers():
                    dist.broadcast(buffer, self.process_group.ranks[0], self.process_group)
        inputs, kwargs = (_to_device(each, self.device) for each in (inputs, kwargs))
        return self.module(*inputs, **kwargs)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._armed:  # the first gradient of this backward pass
            self._armed = False
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce)

    def _reduce(self) -> None:
        missing = [each for each in self._parameters_to_reduce if each.grad is None]
        if missing and not self.find_unused_parameters:
            raise RuntimeError(
                f'{len(missing)} parameter(s) got no gradient: pass find_unused_parameters=True'
            )
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
        gradients = [each.grad for each in self._parameters_to_reduce]
        flat = torch.cat([each.reshape(-1) for each in gradients]) / self.process_group.size()
        dist.all_reduce(flat, group=self.process_group)
        with torch.no_grad():
            for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients])):
                gradient.copy_(part.view_as(gradient))


def _to_device(thing: Any, device: torch.device) -> Any:
    """Move the tensors in containers, as scattering over one card does; leave other objects."""
    if isinstance(thing, torch.Tensor):
        return thing.to(device)
    if isinstance(thing, (list, tuple)):
        return type(thing)(_to_device(each, device) for each in thing)
    if isinstance(thing, dict):
        return {key: _to_device(value, device) for key, value in thing.items()}
    return thing
