"""Checks that features can be cached: the encoder is frozen, and samples are repeatable.

Repeatable means: a sample loaded twice with the same seed is the same. Without ``--views``, samples
must be the same with any seed, because only one view is stored.
"""

from __future__ import annotations

from typing import Any, Mapping, Optional

import torch

from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.loading.keyed_loader import KeyedDataset
from mapsage.extras.streaming.cache.keys import ViewSeeds
from mapsage.extras.streaming.encoder_gate import check_frozen
from mapsage.host.batch_images import packed_mask
from mapsage.host.segmentors import child_module

# Number of samples, and of loads of each sample, that are compared to find out whether the pipeline
# is random. A flip of probability 0.05 is missed in 4 of 100 cases; the training then still gets
# the cached features.
_SAMPLES, _LOADS = 8, 8


def check_model(model: Any) -> None:
    """Raise ConfigError or FeatureSourceError unless the model's features can be cached."""
    if child_module(model, 'backbone') is None:
        raise ConfigError(
            f'features of model.backbone are cached, and {type(model).__name__} has none.'
        )
    if getattr(model.data_preprocessor, 'batch_augments', None) is not None:
        raise ConfigError(
            'data_preprocessor.batch_augments changes images at random after they '
            'are loaded. Move that augmentation into the pipeline.'
        )
    model.train()
    check_frozen(model.backbone)


def check_repeatable(dataset: KeyedDataset, seeds: ViewSeeds, views: Optional[int]) -> None:
    """Load samples several times, and check that loads that must be equal are equal.

    Args:
        dataset: The training dataset.
        seeds: Seeds of its views.
        views: Number of views that the user chose; None if samples must not depend on the seed.

    Raises:
        ConfigError: If a sample differs between two loads that must be equal.
    """
    indices = sorted({len(dataset) * step // _SAMPLES for step in range(_SAMPLES)})
    for index in indices:
        first = dataset.load(index, seeds.of(index, 0))
        different = _difference(first, dataset.load(index, seeds.of(index, 0)))
        if different is not None:
            raise ConfigError(
                f'the {different} of sample {index} differs between two loads with the same seed: '
                f'a transform of train_dataloader draws from its own generator. Cached features '
                f"would not fit the masks. Draw from Python's, NumPy's or torch's global one."
            )
        if views is not None:
            continue
        for view in range(1, _LOADS):
            different = _difference(first, dataset.load(index, seeds.of(index, view)))
            if different is not None:
                raise ConfigError(
                    f'the training pipeline is random (the {different} of sample {index} differs '
                    f'between two loads), and a cache holds fixed views of a sample. Ask for K of '
                    f'them with --views K: each is drawn once, training chooses one of the K each '
                    f'time it needs the sample, and the cache is K times as large. --views 1 '
                    f'fixes the augmentation altogether; or take the random transforms out.'
                )


def check_features(features: object, images: int) -> None:
    """Raise ConfigError unless ``features`` are levels of an encoder for ``images`` images.

    Args:
        features: Output of the backbone: one tensor ``(N, C, h, w)`` for each level.
        images: Number of images N.
    """
    is_levels = (
        isinstance(features, (tuple, list))
        and features
        and all(
            isinstance(level, torch.Tensor)
            and level.dim() == 4
            and len(level) == images
            and level.is_floating_point()
            for level in features
        )
    )
    if not is_levels:
        raise ConfigError(
            'model.backbone must return a tuple of float tensors (N, C, h, w) for '
            f'its features to be cached, got {type(features).__name__}.'
        )


def _difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> Optional[str]:
    """Return ``'image'`` or ``'mask'`` if it differs between two loads of a sample, else None."""
    if not torch.equal(first['inputs'], second['inputs']):
        return 'image'
    mask, second_mask = packed_mask(first), packed_mask(second)
    if mask is not None and second_mask is not None and not torch.equal(mask, second_mask):
        return 'mask'
    return None
