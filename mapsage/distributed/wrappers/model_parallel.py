"""One model on several devices of one process.

`device_map.py` plans which module goes to which device; this module moves the weights and makes the
modules move their inputs (`device_transfer.py`).

The package ``accelerate`` (1.15 was tried on the simulated devices) does not fit. Its hooks follow
``forward`` only, but MMSegmentation passes labels to ``head.loss``, so the first loss fails with
"Expected all tensors to be on the same device"; it leaves the inputs on the CPU; and its planner
does not see ``gcu`` devices.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import TracebackType
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from mmengine.logging import print_log
from mmengine.model import BaseDataPreprocessor, BaseTTAModel, revert_sync_batchnorm
from mmengine.optim import OptimWrapper
from mmengine.registry import MODEL_WRAPPERS
from torch import nn

from mapsage.accelerator import current_accelerator
from mapsage.base.errors import UserError

from .device_map import automatic_map, is_container, resolve_device_map, tensor_owners
from .device_transfer import bring_inputs, bring_outputs, bring_together
from .placement import PlacementError, find_tied_parameters, restore_ties
from .rank_batches import Batch

_Device = Union[int, str, torch.device]
# Methods by which MMSegmentation enters a module.
_ENTRIES = ('forward', 'loss', 'predict')


class CrossDeviceError(UserError, RuntimeError):
    """A module that was cut combines results of its parts that are on different devices."""


@MODEL_WRAPPERS.register_module()
class MMModelParallel(nn.Module):
    """Wrapper that splits a model over the devices of this process, layer by layer.

    Each part runs on one device. A part moves its inputs to its device when it is called: images
    start on the device of the first part, labels go to every head, and losses and predictions end
    on the device of the decode head. Training, optimizers and gradient clipping work as without the
    wrapper, and checkpoints have the same keys. SyncBN becomes BatchNorm, because one process sees
    the whole batch.

    Args:
        module: Model, on any device. It is moved in place, and never as a whole to one device.
        device_map: Path of a module -> device, as an index into ``devices`` or as one of them:
            ``{'backbone': 0, 'backbone.layer4': 1, 'decode_head': 'gcu:1'}``. The longest matching
            path decides, and ``''`` stands for all other modules. None for parts with equal bytes
            of parameters, in forward order.
        devices: Devices to use, as indices of the accelerator's devices or any ``torch.device``;
            None for all devices of the accelerator.

    Attributes:
        module: Model.
        devices: Devices that may be used.
        device_map: Device of every part; it can be used as the argument of the same name.
        input_device: Device that the data preprocessor moves a batch to.
        output_device: Device of the losses and predictions.

    Raises:
        DeviceMapError: If the map does not fit the model or the devices.
        PlacementError: If a parameter or buffer did not reach its device.
    """

    def __init__(
        self,
        module: nn.Module,
        device_map: Optional[Mapping[str, _Device]] = None,
        devices: Optional[Sequence[_Device]] = None,
    ) -> None:
        super().__init__()
        self.module = revert_sync_batchnorm(module)
        self.devices = _find_devices(devices)
        model = self._model
        plan: Mapping[str, _Device] = (
            device_map if device_map is not None else automatic_map(model, len(self.devices))
        )
        self._module_devices = resolve_device_map(model, plan, self.devices)
        owners = tensor_owners(model)
        _move(model, owners, self._module_devices)
        self._spans = _find_spans(owners, self._module_devices)
        self.input_device = self._module_devices[owners[0]]
        self.output_device = self._find_output_device(owners)
        self.device_map: Dict[str, torch.device] = {}
        self._connect()
        print_log(
            self.describe('device_map' if device_map is not None else 'equal parameter bytes'),
            logger='current',
        )

    @property
    def _model(self) -> nn.Module:
        return self.module.module if isinstance(self.module, BaseTTAModel) else self.module

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the model's ``forward``."""
        with self._errors_explained():
            return self.module(*args, **kwargs)

    def train_step(self, data: Batch, optim_wrapper: OptimWrapper) -> Dict[str, torch.Tensor]:
        """Run the model's ``train_step``: preprocess, forward, backward, update."""
        with self._errors_explained():
            return self.module.train_step(data, optim_wrapper)

    def val_step(self, data: Batch) -> list:
        """Run the model's ``val_step``."""
        with self._errors_explained():
            return self.module.val_step(data)

    def test_step(self, data: Batch) -> list:
        """Run the model's ``test_step``."""
        with self._errors_explained():
            return self.module.test_step(data)

    def describe(self, basis: str) -> str:
        """Return a table for the log: device, parameter bytes and parts.

        Args:
            basis: What the split is based on, for the title of the table.
        """
        sizes: Dict[torch.device, int] = dict.fromkeys(self.devices, 0)
        for parameter in self._model.parameters():
            sizes[parameter.device] += parameter.numel() * parameter.element_size()
        lines = [
            f'{type(self._model).__name__} is split over {len(self.devices)} device(s) by {basis}',
            f'{"device":<10}{"parameters":>14}{"share":>8}  parts',
        ]
        total = max(sum(sizes.values()), 1)
        for device, size in sizes.items():
            names = [
                name or '(the model itself)'
                for name, name_device in self.device_map.items()
                if name_device == device
            ]
            lines.append(
                f'{str(device):<10}{size / 2**20:>10.2f} MiB{size / total:>8.1%}  '
                + (', '.join(names) or '(nothing)')
            )
        return '\n'.join(lines)

    def _find_output_device(self, owners: List[str]) -> torch.device:
        # In a cascade of heads, the last one makes the predictions.
        heads = [name for name in owners if name.split('.')[0] == 'decode_head']
        return self._module_devices[(heads or owners)[-1]]

    def _connect(self) -> None:
        """Make every part move its arguments to its device; outputs come from one device."""
        model = self._model
        if model._parameters or model._buffers:
            self.device_map[''] = self._module_devices['']
        for name, child in model.named_children():
            self._connect_part(name, child)
        bring_outputs(model, 'forward', self.output_device)
        if _has_method(model, 'slide_inference'):
            # slide_inference sums the logits of crops on the device of the image. Crops are smaller
            # than logits, so the image is moved to the logits.
            bring_inputs(model, 'slide_inference', self.output_device)

    def _connect_part(self, name: str, module: nn.Module, listed: bool = False) -> None:
        """Make a module and its children move their arguments to their devices.

        Args:
            name: Path of the module.
            module: Module, which may be cut.
            listed: Whether ``device_map`` already has an entry for a module around this one.
        """
        if name not in self._spans:
            return
        split = len(set(self._spans[name])) > 1
        home = self._module_devices.get(name, self._spans[name][0])
        if not listed and (not split or name in self._module_devices):
            self.device_map[name] = home
        if not is_container(module):
            for entry in _ENTRIES:
                if _has_method(module, entry):
                    bring_inputs(module, entry, home, lazily=_has_method(module, 'loss'))
        if split and _has_method(module, 'loss_by_feat'):
            bring_together(module, 'loss_by_feat')
        if split or is_container(module):
            for child_name, child in module.named_children():
                self._connect_part(f'{name}.{child_name}', child, listed or not split)

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            name = self._blame(error.__traceback__) if 'same device' in str(error) else None
            if name is None:
                raise
            kind = type(self._model.get_submodule(name)).__name__
            devices = ', '.join(sorted({str(device) for device in self._spans[name]}))
            raise CrossDeviceError(
                f'{name or "the model"} ({kind}) combines tensors of its parts, and they are on '
                f'{devices}: it cannot be cut. Keep it on one device with a device_map that gives '
                f'{name!r} one and names nothing inside it. PyTorch said: {error}'
            ) from error

    def _blame(self, trace: Optional[TracebackType]) -> Optional[str]:
        """Return the name of the innermost module in the traceback, if that module was cut."""
        names = {id(module): name for name, module in self._model.named_modules()}
        blamed = None
        while trace is not None:
            name = names.get(id(trace.tb_frame.f_locals.get('self')))
            if name is not None and name in self._spans:
                blamed = name if len(set(self._spans[name])) > 1 else None
            trace = trace.tb_next
        return blamed


def _has_method(module: nn.Module, name: str) -> bool:
    """Return whether a module has a method. Users' heads and segmentors share no base class."""
    return callable(getattr(module, name, None))


def _find_devices(devices: Optional[Sequence[_Device]]) -> Tuple[torch.device, ...]:
    accelerator = current_accelerator()
    if devices is None:
        devices = list(range(accelerator.device_count()))
    resolved = tuple(
        accelerator.device(device) if isinstance(device, int) else torch.device(device)
        for device in devices
    )
    if not resolved or len(set(resolved)) < len(resolved):
        raise ValueError(
            f'MMModelParallel devices={devices!r}: expected at least one device and each of them '
            f'once. Leave it out to use all {accelerator.device_count()} of {accelerator.name}.'
        )
    return resolved


def _move(model: nn.Module, owners: Sequence[str], devices: Mapping[str, torch.device]) -> None:
    """Move the tensors of a model to the devices of their modules.

    Args:
        model: Model to move in place.
        owners: Paths of the modules that hold tensors directly.
        devices: Device of each module, by its path.

    Raises:
        PlacementError: If a tensor did not reach its device.
    """
    ties = find_tied_parameters(model)
    for name in owners:
        module = model.get_submodule(name)
        # Without its children, so that the module's _apply moves the direct tensors only.
        children, module._modules = module._modules, type(module._modules)()
        try:
            module._apply(lambda tensor, name=name: tensor.to(devices[name]))  # type: ignore[misc]
        finally:
            module._modules = children
    restore_ties(ties)
    for name, module in model.named_modules():
        if isinstance(module, BaseDataPreprocessor):
            # This also sets the device of the preprocessor's batches.
            module.to(devices[name])
    for name in owners:
        module = model.get_submodule(name)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.device != devices[name]:
                raise PlacementError(
                    f'{name}.{key} is on {tensor.device} and did not reach {devices[name]}. A '
                    f'module that pins its own device or overrides _apply() must leave placement '
                    f'to the caller.'
                )


def _find_spans(
    owners: Sequence[str], devices: Mapping[str, torch.device]
) -> Dict[str, List[torch.device]]:
    """Return the devices of the tensors in each module, in registration order."""
    spans: Dict[str, List[torch.device]] = {}
    for owner in owners:
        path = owner
        while True:
            spans.setdefault(path, []).append(devices[owner])
            if not path:
                break
            path = path.rpartition('.')[0]
    return spans
