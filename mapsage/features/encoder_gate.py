"""Lets a model's frozen encoder answer with features that were computed elsewhere."""
from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
from torch import nn

from .source import Features, StreamingError


class FeatureSourceError(ValueError):
    """``feature_source`` does not go with the config's model, loader or launcher."""


class EncoderGate:
    """Stands before an encoder's ``forward``: passes through, unless a step's features are set.

    The module stays where it is, so that names in checkpoints stay what they are, and validation
    encodes in place. Its mode stays what it is too: a model's ``train()`` puts some backbones into
    training for a moment, and another thread may be encoding then.

    Args:
        encoder: The frozen encoder of the model.
    """

    def __init__(self, encoder: nn.Module) -> None:
        check_frozen(encoder)
        self._encoder = encoder
        self._forward = encoder.forward
        self._fetch: Optional[Callable[[], Features]] = None
        self._features: Optional[Features] = None
        self._shape: Optional[torch.Size] = None
        self._images: Optional[torch.Tensor] = None  # of the step's first call
        encoder.forward = self._answer  # type: ignore[method-assign]
        encoder.train = lambda mode=True: encoder  # type: ignore[method-assign]

    def encode(self, images: torch.Tensor) -> Features:
        """Return the features of images as the model itself computes them, without autograd."""
        with torch.no_grad():
            return as_levels(self._forward(images), self._encoder)

    def open(self, fetch: Callable[[], Features], shape: Optional[torch.Size] = None) -> None:
        """From now on answer with what ``fetch`` returns; it is called once, when first needed.

        Args:
            fetch: Returns the features of the step's images.
            shape: Of those images, where it is known.
        """
        self._fetch, self._features, self._shape, self._images = fetch, None, shape, None

    def close(self) -> None:
        """Encode in place again."""
        self._fetch = self._features = self._images = None

    def remove(self) -> None:
        """Give the encoder its own ``forward`` and ``train`` back."""
        self.close()
        for name in ('forward', 'train'):
            self._encoder.__dict__.pop(name, None)

    def _answer(self, images: torch.Tensor, *args: Any, **kwargs: Any) -> Tuple[torch.Tensor, ...]:
        if self._fetch is None:
            return self._forward(images, *args, **kwargs)
        if self._features is None:
            self._images, self._features = images, self._fetch()
        if images is not self._images:
            raise StreamingError(
                'the model calls its backbone a second time in a step, with other images, and '
                'features of the first came. Take feature_source out of the config.')
        if (self._shape or images.shape) != images.shape \
                or any(len(level) != len(images) for level in self._features):
            raise StreamingError(
                f'the step has images {tuple(images.shape)} and features of '
                f'{[len(level) for level in self._features]} image(s) '
                f'{tuple(self._shape or "")} came. The batch was changed between '
                f'the loader and the encoder: take feature_source out of the config, or what '
                f'changes it.')
        return self._features


def as_levels(features: Any, encoder: nn.Module) -> Features:
    """Return what an encoder gave as features.

    Raises:
        FeatureSourceError: If it is no tuple or list of (n, channels, height, width) tensors.
    """
    if isinstance(features, (tuple, list)) and features and all(
            isinstance(level, torch.Tensor) and level.dim() == 4 for level in features):
        return tuple(features)
    raise FeatureSourceError(
        f'feature_source needs a backbone that returns a tuple of (N, C, H, W) tensors, and '
        f'{type(encoder).__name__} returned {type(features).__name__}. Take feature_source out of '
        f'the config.')


def check_frozen(encoder: nn.Module) -> None:
    """Raise FeatureSourceError unless nothing in the encoder trains."""
    trained = [name for name, each in encoder.named_parameters() if each.requires_grad]
    if trained:
        raise FeatureSourceError(
            f'feature_source needs a frozen encoder, and {len(trained)} parameter(s) of '
            f'model.backbone ({type(encoder).__name__}) are trained, the first {trained[0]!r}. Set '
            f'backbone.frozen=True (DINOv3ViT; other backbones: frozen_stages), or take '
            f'feature_source out of the config.')
    encoder.train()
    training = [f'{name or "itself"} ({type(each).__name__})'
                for name, each in encoder.named_modules()
                if each.training and _differs_in_training(each)]
    if training:
        raise FeatureSourceError(
            f'feature_source needs an encoder that computes the same in every step, and '
            f'{training[0]} of model.backbone is in training mode after model.train(). Set '
            f'backbone.norm_eval=True, or the rate of its dropout to 0.')


def _differs_in_training(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return True
    if isinstance(module, nn.MultiheadAttention):
        return module.dropout > 0
    rate = getattr(module, 'p', getattr(module, 'drop_prob', 0))
    return 'drop' in type(module).__name__.lower() and bool(rate)
