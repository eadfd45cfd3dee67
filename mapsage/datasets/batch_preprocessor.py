"""Normalization of a whole batch at once.

MMSegmentation normalizes and pads image by image. This module stacks the images first and gets
bit-identical results with fewer kernels. Batches that cannot be stacked go through MMSegmentation's
code, so both paths must give equal results; `test_batch_preprocessor.py` compares them.

Shapes:
    inputs         list of (C, H, W), or (N, C, H, W); any dtype
    after forward  (N, C, H', W') float32, padded below and on the right
    mean, std      (C, 1, 1), or (1, 1, 1) for all channels
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple, Union

import torch
from mmengine.structures import BaseDataElement
from mmseg.models import SegDataPreProcessor as _SegDataPreProcessor
from mmseg.registry import MODELS
from mmseg.utils import stack_batch

from .byte_labels import widen_labels


@MODELS.register_module(name='SegDataPreProcessor', force=True)
class SegDataPreProcessor(_SegDataPreProcessor):
    """Replacement of MMSegmentation's ``SegDataPreProcessor`` that normalizes a batch at once.

    Images of equal shape are stacked in their own dtype (uint8 takes a quarter of the memory of
    float32), and then converted, normalized and padded together on the model's device. The result
    is bit-identical, because every number goes through the same operations in the same order.
    Images of different shapes are handed to MMSegmentation's code.

    Images and labels in pinned memory (``pin_memory=True`` of a loader, the default on a GPU) are
    copied to the device asynchronously. Labels that come as uint8 (:mod:`.byte_labels`) become
    int64 on the device.

    The arguments are the same as in MMSegmentation.
    """

    def cast_data(self, data: Any) -> Any:
        """Return ``data`` with its tensors on the device of the model."""
        if isinstance(data, (torch.Tensor, BaseDataElement)):
            # An asynchronous copy is correct on every device only if it starts in pinned memory.
            pinned = self.device.type != 'cpu' and _is_pinned(data)
            moved = data.to(self.device, non_blocking=pinned)
            return moved if isinstance(moved, torch.Tensor) else widen_labels(moved)
        return super().cast_data(data)

    def forward(self, data: Dict[str, Any], training: bool = False) -> Dict[str, Any]:
        """Return a batch for the model: ``inputs`` (N, C, H, W) float32, and ``data_samples``.

        Args:
            data: Batch with ``inputs``, a list of (C, H, W) images or a tensor (N, C, H, W), and
                ``data_samples``, which may be missing in a test.
            training: Whether to pad images and labels by ``size`` and ``size_divisor``. If False,
                images are padded by ``test_cfg``.
        """
        data = self.cast_data(data)
        images = self._stack(data['inputs'])
        if images is None:
            return super().forward(data, training)
        samples: Any = data.get('data_samples', None)
        assert samples is not None or not training, (
            'During training, `data_samples` must be define.'
        )
        if self._converts and images.shape[1] == 3:
            # A list of indices would be copied to the device, for which the host waits.
            images = images.flip(1)
        if training:
            padding = dict(size=self.size, size_divisor=self.size_divisor)
            shape, samples = self._pad_labels(images, samples, padding)
        elif self.test_cfg:
            padding = {key: self.test_cfg.get(key, None) for key in ('size', 'size_divisor')}
            shape, paddings = self._pad_labels(images, None, padding)
            for sample, pad_facts in zip(samples, paddings):
                sample.set_metainfo({**pad_facts})
        else:
            shape = images.shape[2:]
        images = self._normalize(images, shape)
        if training and self.batch_augments is not None:
            images, samples = self.batch_augments(images, samples)
        return dict(inputs=images, data_samples=samples)

    def _pad_labels(
        self, images: torch.Tensor, samples: Optional[List[Any]], padding: Dict[str, Any]
    ) -> Tuple[torch.Size, List[Any]]:
        """Return the height and width to pad to, and the samples with padded labels.

        If ``samples`` is None, the second value is a dict per image for the metainfo of its sample.
        """
        # MMSegmentation's function computes sizes and pads labels. It gets images without channels,
        # because padding those costs nothing.
        empty = [torch.empty(0, *images.shape[2:])] * len(images)
        stack, samples = stack_batch(
            empty, samples, pad_val=self.pad_val, seg_pad_val=self.seg_pad_val, **padding
        )
        return stack.shape[2:], samples

    def _normalize(self, images: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return (N, C, H, W) images as float32 of ``shape``, padded below and on the right."""
        height, width = images.shape[2:]
        if (height, width) == tuple(shape):
            # Normalized in place below. That is safe, because `_stack` made a new tensor.
            batch = inside = images.float()
        else:
            batch = torch.full(
                (*images.shape[:2], *shape), self.pad_val, dtype=torch.float32, device=images.device
            )
            inside = batch[:, :, :height, :width]
            inside.copy_(images)
        if self._enable_normalize:
            inside.sub_(self.mean).div_(self.std)
        return batch

    @property
    def _converts(self) -> bool:
        """Whether the order of the channels is reversed."""
        # The attribute's name differs between versions of MMSegmentation.
        conversion = getattr(self, '_channel_conversion', None)
        return self.channel_conversion if conversion is None else conversion

    def _stack(self, images: object) -> Optional[torch.Tensor]:
        """Return images as one new tensor (N, C, H, W).

        Returns None if they differ in shape, dtype or device, or cannot be normalized in place.
        """
        if not isinstance(images, (list, tuple, torch.Tensor)) or not all(
            isinstance(image, torch.Tensor) and image.dim() == 3 for image in images
        ):
            return None
        kinds = {(image.shape, image.dtype, image.device) for image in images}
        if len(kinds) != 1:
            return None
        ((shape, _, _),) = kinds
        # A mean with more channels than the image, or of float64, would change the shape or dtype
        # of the result.
        in_place = not self._enable_normalize or all(
            len(statistic) in (1, shape[0])
            and torch.promote_types(torch.float32, statistic.dtype) == torch.float32
            for statistic in (self.mean, self.std)
        )
        return torch.stack(tuple(images)) if in_place else None


def _is_pinned(value: Union[torch.Tensor, BaseDataElement]) -> bool:
    """Return whether a tensor, or every tensor of a data element, is in pinned host memory."""
    if isinstance(value, BaseDataElement):
        return all(
            _is_pinned(field)
            for field in value.values()
            if isinstance(field, (torch.Tensor, BaseDataElement))
        )
    return bool(value.device.type == 'cpu' and value.is_pinned())
