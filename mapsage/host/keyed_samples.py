"""The samples of MapSage's training loader, as hooks see them.

The loader's class is in ``engine/loading``, which hooks cannot import since it stands above them.
Its samples can be loaded again by index and seed, and hooks set what is done with each loaded
sample. A loader that a user built has no such samples.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Protocol, Tuple


class KeyedSamples(Protocol):
    """The samples of MapSage's training loader: what its workers read, see ``KeyedDataset``.

    Attributes:
        dataset: Dataset of the config.
        finish: Function called with ``(index, seed, sample)`` for each loaded sample; its result
            replaces the sample.
        reseed: Function called with ``(index, seed)`` before a sample is loaded; returns its seed.
        keep_keys: Whether ``(index, seed)`` is written into each sample's metainfo.
        show_keys: The same for samples that have metainfo, for display.
        narrow: Whether label maps travel as uint8, which the model's preprocessor must expect.
        loader_name: Name of the loader in messages, such as ``'train_dataloader'``.
    """

    dataset: Any
    finish: Optional[Callable[[int, Tuple[int, ...], Any], Any]]
    reseed: Optional[Callable[[int, Tuple[int, ...]], Tuple[int, ...]]]
    keep_keys: bool
    show_keys: bool
    narrow: bool
    loader_name: str

    def __len__(self) -> int:
        """Return the number of samples."""

    def load(self, index: int, seed: Tuple[int, ...]) -> Any:
        """Return the sample at ``index``, drawn with ``seed``."""


def keyed_samples(loader: Any) -> Optional[KeyedSamples]:
    """Return the samples of a loader that MapSage built.

    Returns:
        The samples; None for a loader that a user built or that reads an IterableDataset.
    """
    return getattr(loader, 'samples', None)
