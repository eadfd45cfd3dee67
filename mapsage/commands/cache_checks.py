"""Checks that features can be computed once: the encoder is frozen and samples are repeatable."""
from __future__ import annotations

from typing import Any, Optional

import torch

from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.loading.keyed_loader import KeyedDataset
from mapsage.features.cache.keys import ViewSeeds
from mapsage.features.encoder_gate import check_frozen

# Samples, and loads of each, that are compared to find out whether the pipeline is random. A flip
# of probability 0.05 goes unnoticed in 4 of 100 cases; training then still loads what was cached.
_SAMPLES, _LOADS = 8, 8


def check_model(model: Any) -> None:
    """Raise ConfigError or FeatureSourceError unless the model's features can be cached."""
    if not isinstance(getattr(model, 'backbone', None), torch.nn.Module):
        raise ConfigError(f'features of model.backbone are cached, and {type(model).__name__} has '
                          f'none.')
    if getattr(model.data_preprocessor, 'batch_augments', None) is not None:
        raise ConfigError('data_preprocessor.batch_augments changes images at random after they '
                          'are loaded. Move that augmentation into the pipeline.')
    model.train()
    check_frozen(model.backbone)


def check_repeatable(dataset: KeyedDataset, seeds: ViewSeeds, asked: Optional[int]) -> None:
    """Load samples to check that each depends on its seed only, and without views not even on that.

    Args:
        dataset: The training dataset.
        seeds: Seeds of its views.
        asked: Number of views that was asked for; None if nobody asked for views.

    Raises:
        ConfigError: If a sample differs between two loads that must be equal.
    """
    samples = sorted({len(dataset) * part // _SAMPLES for part in range(_SAMPLES)})
    for index in samples:
        first = dataset.load(index, seeds.of(index, 0))
        what = _difference(first, dataset.load(index, seeds.of(index, 0)))
        if what is not None:
            raise ConfigError(
                f'the {what} of sample {index} differs between two loads with the same seed: a '
                f'transform of train_dataloader draws from a generator of its own. Cached features '
                f"would not fit the masks. Draw from Python's, NumPy's or torch's global one.")
        if asked is not None:
            continue
        for view in range(1, _LOADS):
            what = _difference(first, dataset.load(index, seeds.of(index, view)))
            if what is not None:
                raise ConfigError(
                    f'the training pipeline is random (the {what} of sample {index} differs '
                    f'between two loads), and a cache holds fixed views of a sample. Ask for K of '
                    f'them with --views K: each is drawn once, training chooses one of the K each '
                    f'time it needs the sample, and the cache is K times as large. --views 1 '
                    f'fixes the augmentation altogether; or take the random transforms out.')


def check_features(features: Any, images: int) -> None:
    """Raise ConfigError unless ``features`` are levels of an encoder for ``images`` images."""
    good = isinstance(features, (tuple, list)) and features and all(
        isinstance(level, torch.Tensor) and level.dim() == 4 and len(level) == images
        and level.is_floating_point() for level in features)
    if not good:
        raise ConfigError('model.backbone must return a tuple of float tensors (N, C, h, w) for '
                          f'its features to be cached, got {type(features).__name__}.')


def _difference(one: Any, other: Any) -> Optional[str]:
    """Return which part of a sample differs from another's."""
    if not torch.equal(one['inputs'], other['inputs']):
        return 'image'
    mask, other_mask = (getattr(getattr(each['data_samples'], 'gt_sem_seg', None), 'data', None)
                        for each in (one, other))
    if isinstance(mask, torch.Tensor) and isinstance(other_mask, torch.Tensor) \
            and not torch.equal(mask, other_mask):
        return 'mask'
    return None
