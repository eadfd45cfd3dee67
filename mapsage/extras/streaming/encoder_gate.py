"""Makes a model's frozen encoder return features that a feature source provides.

The model's code stays unchanged: it calls its backbone as always, and the backbone's ``forward``
returns the features of the current step. The functions below check that the encoder really is
frozen.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
from torch import nn

from mapsage.base.errors import UserError
from mapsage.models.frozen_weights import why_not_frozen

from .source import Features, StackFeatures, StreamingError


class FeatureSourceError(UserError, ValueError):
    """``feature_source`` does not fit the config's model, loader or launcher."""

    on_every_rank = True


class EncoderGate:
    """Replaces an encoder's ``forward``: it returns a step's features while the gate is open.

    While the gate is closed the encoder computes as before, for example in validation. The module
    itself is not replaced, so that names in checkpoints do not change. ``train()`` no longer
    changes the encoder's mode, since a model's ``train()`` puts some backbones into training mode
    for a moment, in which another thread may be encoding.

    Args:
        encoder: Frozen encoder of the model.
    """

    def __init__(self, encoder: nn.Module) -> None:
        check_frozen(encoder)
        self._encoder = encoder
        self._forward = encoder.forward
        self._fetch: Optional[Callable[[], Features]] = None
        self._features: Optional[Features] = None
        self._shape: Optional[torch.Size] = None
        # Images of the step's first call.
        self._images: Optional[torch.Tensor] = None
        encoder.forward = self._answer  # type: ignore[method-assign]
        encoder.train = lambda mode=True: encoder  # type: ignore[method-assign]

    def encode(self, images: torch.Tensor) -> Features:
        """Return the features that the encoder computes for images, without autograd."""
        with torch.no_grad():
            return as_levels(self._forward(images), self._encoder)

    def open(self, fetch: Callable[[], Features], shape: Optional[torch.Size] = None) -> None:
        """Return the features of ``fetch`` from now on.

        Args:
            fetch: Function that returns the features of the step's images; called once, when the
                model calls its encoder.
            shape: Shape of those images, if it is known.
        """
        self._fetch, self._features, self._shape, self._images = fetch, None, shape, None

    def close(self) -> None:
        """Let the encoder compute again."""
        self._fetch = self._features = self._images = None

    def remove(self) -> None:
        """Restore the encoder's original ``forward`` and ``train``."""
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
                'the model calls its backbone a second time in a step, with other images, but '
                'there are features for the first call only. Take feature_source out of the '
                'config.'
            )
        if (self._shape or images.shape) != images.shape or any(
            len(level) != len(images) for level in self._features
        ):
            raise StreamingError(
                f'the step has images {tuple(images.shape)}, and its features are those of '
                f'{[len(level) for level in self._features]} image(s) '
                f'{tuple(self._shape or "")}. The batch was changed between the loader and the '
                f'encoder: take feature_source, or whatever changes the batch, out of the config.'
            )
        return self._features


def as_levels(features: object, encoder: nn.Module) -> Features:
    """Return the output of an encoder as features.

    Raises:
        FeatureSourceError: If it is not a tuple or list of (n, channels, height, width) tensors.
    """
    if (
        isinstance(features, (tuple, list))
        and features
        and all(isinstance(level, torch.Tensor) and level.dim() == 4 for level in features)
    ):
        return (
            StackFeatures(features) if getattr(encoder, 'returns_facts', False) else tuple(features)
        )
    raise FeatureSourceError(
        f'feature_source needs a backbone that returns a tuple of (N, C, H, W) tensors, and '
        f'{type(encoder).__name__} returned {type(features).__name__}. Take feature_source out of '
        f'the config.'
    )


def check_frozen(encoder: nn.Module) -> None:
    """Raise FeatureSourceError if an encoder has trained parameters, or layers in training mode."""
    obstacle = why_not_frozen(encoder, 'feature_source')
    if obstacle is not None:
        raise FeatureSourceError(obstacle)
