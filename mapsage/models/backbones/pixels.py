"""Range check of the pixel values that reach a backbone with built-in normalization.

DINOv3 backbones expect RGB in 0..255 and normalize it themselves. Images that the data preprocessor
has already normalized would train without any error, only worse, so the first batches are checked.
"""

from __future__ import annotations

import logging
from typing import Set

import torch
from mmengine.logging import print_log

from mapsage.base.errors import UserError

# Reading values waits for the device, so only the first batches are checked.
_CHECKED_BATCHES = 8


class BackboneInputError(UserError, ValueError):
    """An image has a size or values that the backbone does not accept."""

    on_every_rank = True


class PixelRange:
    """Checks that the first batches are RGB in 0..255, before a backbone normalizes them.

    Args:
        name: Name of the backbone, for messages.
        remedy: End of the messages: what to do if another range is intended.
    """

    def __init__(self, name: str, remedy: str) -> None:
        self.name, self.remedy = name, remedy
        self.batches_left = _CHECKED_BATCHES
        self._warned: Set[str] = set()

    def __call__(self, x: torch.Tensor) -> None:
        """Check a batch, until eight batches with any value above 0 have been checked.

        Values above 255, and images within 0..1, are logged once each.

        Raises:
            BackboneInputError: If a value is below 0, as in normalized images.
        """
        if not self.batches_left:
            return
        low, high = torch.stack([x.detach().min(), x.detach().max()]).tolist()
        if low < 0:
            raise BackboneInputError(
                f'input down to {low:.3f}, expected RGB in 0..255, which {self.name} '
                f'normalizes; take mean and std out of the data preprocessor{self.remedy}'
            )
        # Images that are entirely 0 (no data) say nothing about the range.
        self.batches_left -= high > 0
        if high > 255:
            self._warn_once('above', f'up to {high:g}, as in 16-bit images')
        elif 0 < high <= 1:
            self._warn_once('scaled', f'up to {high:g}, as if scaled to 0..1')

    def _warn_once(self, kind: str, values: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            print_log(
                f'{self.name}: input {values}; expected RGB in 0..255, which it normalizes. '
                f'Scale the images to 0..255{self.remedy}',
                logger='current',
                level=logging.WARNING,
            )
