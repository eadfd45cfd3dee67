"""Weights of single samples in the losses of segmentation heads."""
from __future__ import annotations

from typing import Any, Callable, Dict, Sequence

import torch


class PixelWeights:
    """The pixel sampler of a decode head, with a weight for each sample of the batch.

    MMSegmentation's heads multiply the losses of pixels by what their sampler returns.

    Args:
        weights: Function that returns the weights of the batch that is trained on.
        inner: Sampler that the head had, for example OHEM; None without one.

    Attributes:
        inner: The argument of that name.
        asked: Whether the head has asked for weights.
    """

    def __init__(self, weights: Callable[[], Sequence[float]], inner: Any) -> None:
        self._weights, self.inner, self.asked = weights, inner, False

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
            raise ValueError(f'{len(seg_label)} samples reach the loss and dynamic sampling gave '
                             f'{len(weights)} with their weights: something between them adds or '
                             f'drops samples. Set unbiased=False.')
        column = torch.tensor(weights, dtype=torch.float32, device=seg_logit.device)
        tiles = column.view(-1, 1, 1).expand(len(seg_label), *seg_label.shape[2:])
        return tiles if self.inner is None else self.inner.sample(seg_logit, seg_label) * tiles


def weigh_heads(model: torch.nn.Module,
                weights: Callable[[], Sequence[float]]) -> Dict[str, PixelWeights]:
    """Let all decode heads of a segmentor weigh the samples; return their samplers by name.

    Args:
        model: Segmentor, which may be wrapped.
        weights: Function that returns the weights of the batch that is trained on.

    Raises:
        ValueError: If there is no such head, or one has a loss that is no mean over the pixels.
    """
    from mmseg.models.losses import CrossEntropyLoss
    heads = {name: module for name, module in model.named_modules()
             if hasattr(module, 'loss_decode') and hasattr(module, 'sampler')}
    if not heads:
        raise ValueError(f'unbiased=True weighs the pixels of decode heads of MMSegmentation, and '
                         f'{type(model).__name__} has none. Set unbiased=False, or use the weights '
                         f'of mapsage.sampling.SampledBatch in a loop of your own.')
    for name, head in heads.items():
        losses: Any = head.loss_decode
        for loss in losses if isinstance(losses, torch.nn.ModuleList) else [losses]:
            if not isinstance(loss, CrossEntropyLoss):
                raise ValueError(f'unbiased=True, and {name} has {type(loss).__name__}, which is '
                                 f'not a mean over the pixels, so that a tile cannot be weighed '
                                 f'in it. Use CrossEntropyLoss alone, or unbiased=False.')
    samplers = {}
    for name, head in heads.items():
        # A model that was trained before, or is a copy of one that is trained, has weights already.
        inner = head.sampler.inner if isinstance(head.sampler, PixelWeights) else head.sampler
        samplers[name] = PixelWeights(weights, inner)
        setattr(head, 'sampler', samplers[name])  # noqa: B010  (mypy takes it for a module)
    return samplers


def check_asked(samplers: Dict[str, PixelWeights]) -> None:
    """Raise ValueError if a head has computed its loss without the weights."""
    silent = [name for name, sampler in samplers.items() if not sampler.asked]
    if silent:
        raise ValueError(f'unbiased=True, and {", ".join(silent)} did not ask for the weights: its '
                         f'loss_by_feat is not that of BaseDecodeHead. Set unbiased=False.')
