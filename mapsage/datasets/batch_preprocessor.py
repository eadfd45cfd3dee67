"""Normalization of a batch at once, with the bits of MMSegmentation's, which does it by image."""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import torch
from mmengine.structures import BaseDataElement
from mmseg.models import SegDataPreProcessor as _SegDataPreProcessor
from mmseg.registry import MODELS
from mmseg.utils import stack_batch


@MODELS.register_module(name='SegDataPreProcessor', force=True)
class SegDataPreProcessor(_SegDataPreProcessor):
    """MMSegmentation's ``SegDataPreProcessor``, which normalizes a batch at once. It replaces it.

    Images of equal shape are stacked as they come, which for 8 bits takes a quarter of the memory
    of float32, and are then converted, normalized and padded together on the device of the model.
    The result has the same bits, since each number goes through the same operations in the same
    order. Images of different shapes go through MMSegmentation's own code.

    Images and labels in pinned memory, which ``train_dataloader.pin_memory=True`` asks for, are
    copied to the device while the host goes on.

    Arguments are those of MMSegmentation.
    """

    def cast_data(self, data: Any) -> Any:
        """Return ``data`` with its tensors on the device of the model."""
        if isinstance(data, (torch.Tensor, BaseDataElement)):
            # Only there is a copy in the background certain to be correct on every device.
            pinned = self.device.type != 'cpu' and _is_pinned(data)
            return data.to(self.device, non_blocking=pinned)
        return super().cast_data(data)

    def forward(self, data: Dict[str, Any], training: bool = False) -> Dict[str, Any]:
        """Return a batch for the model: ``inputs`` (N, C, H, W) float32, and ``data_samples``.

        Args:
            data: Batch with ``inputs``, a list of (C, H, W) images or a tensor (N, C, H, W), and
                ``data_samples``, which may be missing in a test.
            training: Whether to pad by ``size`` and ``size_divisor``, the labels too, instead of
                by ``test_cfg``.
        """
        data = self.cast_data(data)
        images = self._stacked(data['inputs'])
        if images is None:
            return super().forward(data, training)
        samples: Any = data.get('data_samples', None)
        assert samples is not None or not training, \
            'During training, `data_samples` must be define.'
        if self._converts and images.shape[1] == 3:
            images = images[:, [2, 1, 0]]
        if training:
            padding = dict(size=self.size, size_divisor=self.size_divisor)
            shape, samples = self._padded(images, samples, padding)
        elif self.test_cfg:
            padding = {key: self.test_cfg.get(key, None) for key in ('size', 'size_divisor')}
            shape, sizes = self._padded(images, None, padding)
            for sample, each in zip(samples, sizes):
                sample.set_metainfo({**each})
        else:
            shape = images.shape[2:]
        images = self._normalized(images, shape)
        if training and self.batch_augments is not None:
            images, samples = self.batch_augments(images, samples)
        return dict(inputs=images, data_samples=samples)

    def _padded(self, images: torch.Tensor, samples: Optional[List[Any]],
                padding: Dict[str, Any]) -> Tuple[torch.Size, List[Any]]:
        """Return the height and width to pad to, and the samples with padded labels.

        Without samples, return what is to be written into their metainfo.
        """
        # MMSegmentation's function is shown images without channels, which cost nothing.
        empty = [torch.empty(0, *images.shape[2:])] * len(images)
        stack, samples = stack_batch(empty, samples, pad_val=self.pad_val,
                                     seg_pad_val=self.seg_pad_val, **padding)
        return stack.shape[2:], samples

    def _normalized(self, images: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return (N, C, H, W) images as float32 of ``shape``, padded below and on the right."""
        height, width = images.shape[2:]
        if (height, width) == tuple(shape):
            batch = inside = images.float()  # in place below: the stack belongs to nobody else
        else:
            batch = torch.full((*images.shape[:2], *shape), self.pad_val, dtype=torch.float32,
                               device=images.device)
            inside = batch[:, :, :height, :width]
            inside.copy_(images)
        if self._enable_normalize:
            inside.sub_(self.mean).div_(self.std)
        return batch

    @property
    def _converts(self) -> bool:
        """Whether the order of the channels is reversed; the name differs between versions."""
        found = getattr(self, '_channel_conversion', None)
        return self.channel_conversion if found is None else found

    def _stacked(self, images: Any) -> Optional[torch.Tensor]:
        """Return images of one kind as one new tensor (N, C, H, W), or None for all others."""
        if not isinstance(images, (list, tuple, torch.Tensor)) or not all(
                isinstance(each, torch.Tensor) and each.dim() == 3 for each in images):
            return None
        kinds = {(each.shape, each.dtype, each.device) for each in images}
        if len(kinds) != 1:
            return None
        (shape, _, _), = kinds
        # A mean that adds channels, or numbers of 64 bits, change more than the values.
        in_place = not self._enable_normalize or all(
            len(each) in (1, shape[0])
            and torch.promote_types(torch.float32, each.dtype) == torch.float32
            for each in (self.mean, self.std))
        return torch.stack(tuple(images)) if in_place else None


def _is_pinned(value: Any) -> bool:
    """Return whether all tensors of a data element, or a tensor, are in pinned host memory."""
    if isinstance(value, BaseDataElement):
        return all(_is_pinned(field) for field in value.values()
                   if isinstance(field, (torch.Tensor, BaseDataElement)))
    return bool(value.device.type == 'cpu' and value.is_pinned())
