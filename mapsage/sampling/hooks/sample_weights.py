"""Weights of single samples in the losses of segmentation heads.

For ``unbiased=True`` and ``shortfall='mask'`` of the sampling hook.

MMSegmentation's heads multiply the losses of pixels by what their pixel sampler returns. A sampler
that returns a weight per sample therefore weighs samples without a change to the head. That works
only for losses that are means over the pixels, so :func:`weigh_heads` checks the losses first.

Shapes: N samples, C classes, H x W pixels.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Protocol, Sequence

import torch
from torch import nn


class PixelSampler(Protocol):
    """A pixel sampler of MMSegmentation, such as OHEM."""

    def sample(self, seg_logit: torch.Tensor, seg_label: torch.Tensor) -> torch.Tensor:
        """Return weights of shape ``(N, H, W)``."""


class PixelWeights:
    """The pixel sampler of a decode head, with a weight for each sample of the batch.

    Args:
        weights: Function that returns the weights of the batch in training.
        inner: Sampler that the head had before, such as OHEM; None without one.
        setting: Setting that asks for the weights, for messages.

    Attributes:
        inner, setting: The arguments of these names.
        asked: Whether the head has asked for weights.
    """

    def __init__(
        self,
        weights: Callable[[], Sequence[float]],
        inner: Optional[PixelSampler],
        setting: str = 'unbiased=True',
    ) -> None:
        self._weights, self.inner, self.asked = weights, inner, False
        self.setting = setting

    def sample(self, seg_logit: torch.Tensor, seg_label: torch.Tensor) -> torch.Tensor:
        """Return float32 weights of shape ``(N, H, W)``.

        Args:
            seg_logit: Logits of shape ``(N, C, H, W)``.
            seg_label: Labels of shape ``(N, 1, H, W)``.

        Raises:
            ValueError: If the batch does not have as many samples as there are weights.
        """
        self.asked = True
        weights = self._weights()
        if len(weights) != len(seg_label):
            raise ValueError(
                f'{len(seg_label)} samples reach the loss and dynamic sampling gave '
                f'{len(weights)} with their weights: something between them adds or '
                f'drops samples. Remove {self.setting}.'
            )
        column = torch.tensor(weights, dtype=torch.float32, device=seg_logit.device)
        sample_weights = column.view(-1, 1, 1).expand(len(seg_label), *seg_label.shape[2:])
        if self.inner is None:
            return sample_weights
        return self.inner.sample(seg_logit, seg_label) * sample_weights


def weigh_heads(
    model: nn.Module, weights: Callable[[], Sequence[float]], setting: str = 'unbiased=True'
) -> Dict[str, PixelWeights]:
    """Let all decode heads of a segmentor weigh the samples; return their samplers by name.

    Args:
        model: Segmentor, which may be wrapped.
        weights: Function that returns the weights of the batch in training.
        setting: Setting that asks for the weights, for messages.

    Raises:
        ValueError: If the model has no decode head, or a head has a loss that is not a mean over
            the pixels.
    """
    from mmseg.models.losses import CrossEntropyLoss

    # Not by class: heads of other packages have the same two attributes.
    heads: Dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, 'loss_decode') and hasattr(module, 'sampler')
    }
    if not heads:
        raise ValueError(
            f'{setting} weighs the pixels of decode heads of MMSegmentation, and '
            f'{type(model).__name__} has none. Remove it, or use the weights '
            f'of mapsage.sampling.SampledBatch in your training loop.'
        )
    for name, head in heads.items():
        losses = head.loss_decode
        for loss in losses if isinstance(losses, nn.ModuleList) else [losses]:
            if not isinstance(loss, CrossEntropyLoss):
                raise ValueError(
                    f'{setting}, and {name} has {type(loss).__name__}, which is '
                    f'not a mean over the pixels, so that a tile cannot be weighed '
                    f'in it. Use CrossEntropyLoss only, or remove {setting}.'
                )
    samplers = {}
    for name, head in heads.items():
        # A model that was trained before, or a copy of a trained model, already has weights.
        inner = head.sampler.inner if isinstance(head.sampler, PixelWeights) else head.sampler
        head.sampler = samplers[name] = PixelWeights(weights, inner, setting)
    return samplers


def check_asked(samplers: Dict[str, PixelWeights]) -> None:
    """Raise ValueError if a head has computed its loss without the weights."""
    silent = [name for name, sampler in samplers.items() if not sampler.asked]
    if silent:
        setting = samplers[silent[0]].setting
        raise ValueError(
            f'{setting}, and {", ".join(silent)} did not ask for the weights: its '
            f'loss_by_feat is not the method of BaseDecodeHead. Remove {setting}.'
        )
