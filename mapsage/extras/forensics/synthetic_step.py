"""One training step and one forward pass of a config, with images and labels that are drawn.

The data of the config need not exist. Images have the config's crop size and channels, labels its
classes. A step that a hook of the config carries out, such as FixMatch's, is not imitated: the step
here is the model's own, with the config's optimizer and gradient clipping.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.optim import OptimWrapper, build_optim_wrapper
from mmengine.registry import DefaultScope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from torch import nn

from mapsage.distributed import error_text
from mapsage.engine.config import explain_config_error, optimizer_mistake
from mapsage.engine.env_cfg import ConfigError

# BatchNorm of a single value needs a second image, and more images call the same operators.
IMAGES = 2
_DEFAULT_CROP = 512


@dataclass
class SyntheticStep:
    """A model with its optimizer and a batch, ready for a step.

    Attributes:
        model: Model of the config, on any device.
        optim_wrapper: Optimizer of the config with its gradient clipping, in full precision.
        batch: Arguments of the model's data preprocessor: images and samples on the CPU.
        crop: Height and width of the images in pixels.
        amp: Data type of a training in mixed precision; None for float32.
    """

    model: Any
    optim_wrapper: OptimWrapper
    batch: Dict[str, List[Any]]
    crop: Tuple[int, int]
    amp: Optional[torch.dtype]

    def train(self) -> Callable[[], None]:
        """Return a function that carries out a training step, with a new copy of the batch."""
        batch = copy.deepcopy(self.batch)

        def step() -> None:
            self.optim_wrapper.update_params(self._loss(batch))

        return step

    def gradients(self) -> Dict[str, torch.Tensor]:
        """Carry out a training step without the optimizer.

        Returns:
            Name -> loss (named ``'loss'``) and gradients of the parameters, on their device.
        """
        for parameter in self.model.parameters():
            parameter.grad = None
        loss = self._loss(copy.deepcopy(self.batch))
        if loss.requires_grad:
            loss.backward()
        return {
            'loss': loss.detach(),
            **{
                name: parameter.grad
                for name, parameter in self.model.named_parameters()
                if parameter.grad is not None
            },
        }

    def predict(self) -> Callable[[], None]:
        """Return a function that carries out a prediction, with a new copy of the batch."""
        batch = copy.deepcopy(self.batch)

        def forward() -> None:
            with torch.no_grad():
                data = self.model.eval().data_preprocessor(batch, False)
                self.model(**data, mode='predict')

        return forward

    def _loss(self, batch: Dict[str, List[Any]]) -> torch.Tensor:
        data = self.model.train().data_preprocessor(batch, True)
        with self._autocast(data):
            losses = self.model(**data, mode='loss')
        return self.model.parse_losses(losses)[0]

    def make_optimizer_state(self) -> None:
        """Let the optimizer make its state, which a run does once, in its first step."""
        for group in self.optim_wrapper.optimizer.param_groups:
            # Cards update many tensors in a call, the CPU one by one.
            if group.get('foreach', True) is None:
                group['foreach'] = True
            for parameter in group['params']:
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        self.optim_wrapper.step()
        self.optim_wrapper.zero_grad()

    def _autocast(self, data: Any) -> AbstractContextManager:
        if self.amp is None:
            return nullcontext()
        inputs = data['inputs']
        return torch.autocast(inputs.device.type, dtype=self.amp)


def build_step(
    cfg: Config,
    built_model: nn.Module,
    crop: Optional[int] = None,
    amp_dtype: torch.dtype = torch.bfloat16,
) -> SyntheticStep:
    """Return a step of a config's model.

    Args:
        cfg: Complete config.
        built_model: Model of the config, on the device of the step; SyncBN becomes BatchNorm.
        crop: Height and width of the images in pixels; None for the config's crop size.
        amp_dtype: Data type of mixed precision, if the config trains in it and names none.

    Raises:
        ConfigError: If the optimizer cannot be built.
    """
    model: Any = revert_sync_batchnorm(built_model)
    height, width = (crop, crop) if crop else _crop_size(cfg, model)
    if getattr(model.data_preprocessor, 'size', None) is not None:
        # Otherwise it pads smaller images to the config's size.
        model.data_preprocessor.size = (height, width)
    generator = torch.Generator().manual_seed(0)
    inputs, samples = [], []
    for _ in range(IMAGES):
        inputs.append(
            torch.randint(
                0, 256, (_channels(model), height, width), dtype=torch.uint8, generator=generator
            )
        )
        sample = SegDataSample()
        sample.gt_sem_seg = PixelData(data=_draw_labels(_classes(model), height, width, generator))
        sample.set_metainfo(
            dict(
                img_shape=(height, width),
                ori_shape=(height, width),
                pad_shape=(height, width),
                img_path='synthetic',
            )
        )
        samples.append(sample)
    wrapper: Any = cfg.get('optim_wrapper') or dict(optimizer=dict(type='SGD', lr=0.01))
    return SyntheticStep(
        model,
        _build_optimizer(cfg, model, wrapper),
        dict(inputs=inputs, data_samples=samples),
        (height, width),
        _mixed_precision(wrapper, amp_dtype),
    )


def _draw_labels(classes: int, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Return a mask (1, height, width) of int64 classes in squares of 16 pixels."""
    squares = torch.randint(0, classes, (1, -(-height // 16), -(-width // 16)), generator=generator)
    return squares.repeat_interleave(16, 1).repeat_interleave(16, 2)[:, :height, :width]


def _crop_size(cfg: Config, model: Any) -> Tuple[int, int]:
    """Return the crop (height, width) to which the config pads, or that its pipeline cuts."""
    size = getattr(model.data_preprocessor, 'size', None) or cfg.get('crop_size')
    if size is None:
        pipeline = ((cfg.get('train_dataloader') or {}).get('dataset') or {}).get('pipeline') or []
        size = next(
            (
                step['crop_size']
                for step in pipeline
                if isinstance(step, dict) and step.get('crop_size')
            ),
            _DEFAULT_CROP,
        )
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _channels(model: Any) -> int:
    """Return the channels of the model's images."""
    mean = getattr(model.data_preprocessor, 'mean', None)
    if mean is not None:
        return int(mean.numel())
    first = next((layer for layer in model.modules() if isinstance(layer, nn.Conv2d)), None)
    return 3 if first is None else first.in_channels


def _classes(model: Any) -> int:
    """Return the largest number of classes of the model's heads."""
    return max(
        (
            int(module.num_classes)
            for module in model.modules()
            if isinstance(getattr(module, 'num_classes', None), int)
        ),
        default=2,
    )


def _build_optimizer(cfg: Config, model: nn.Module, wrapper: Dict[str, Any]) -> OptimWrapper:
    plain = {
        key: copy.deepcopy(value)
        for key, value in wrapper.items()
        if key in ('optimizer', 'constructor', 'paramwise_cfg', 'clip_grad')
    }
    plain['optimizer'].pop('fused', None)
    try:
        with DefaultScope.overwrite_default_scope(
            cfg.get('default_scope', 'mmengine')
        ), warnings.catch_warnings():
            # The run shows these warnings.
            warnings.simplefilter('ignore')
            return build_optim_wrapper(model, dict(plain, type='OptimWrapper'))
    # A user's optimizer may raise anything.
    except Exception as error:
        reason = optimizer_mistake(plain) or error_text(explain_config_error(error))
        raise ConfigError(f'the optimizer of the config cannot be built: {reason}') from error


def _mixed_precision(wrapper: Dict[str, Any], default: torch.dtype) -> Optional[torch.dtype]:
    kind: Any = wrapper.get('type')
    if getattr(kind, '__name__', kind) != 'AmpOptimWrapper':
        return None
    name = str(wrapper.get('dtype') or default).split('.')[-1]
    return getattr(torch, name, default)
