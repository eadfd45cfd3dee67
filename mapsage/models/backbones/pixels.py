"""A look at the values of images that a backbone normalizes itself."""
from __future__ import annotations

import logging
from typing import Set

import torch
from mmengine.logging import print_log

from mapsage.errors import UserError

# Images that are looked at. Reading their values waits for the device, so it is done for few.
_LOOKS = 8


class BackboneInputError(UserError, ValueError):
    """An image has a size or values that the backbone does not accept."""


class PixelRange:
    """Checks that the first images are RGB in 0..255, in front of a backbone's normalization.

    Args:
        name: Name of the backbone, for messages.
        remedy: End of the messages: what to do if the images are meant to be in another range.
    """

    def __init__(self, name: str, remedy: str) -> None:
        self.name, self.remedy = name, remedy
        self.looks_left = _LOOKS
        self._said: Set[str] = set()

    def __call__(self, x: torch.Tensor) -> None:
        """Look at a batch, unless eight with any value above 0 have been looked at.

        Values above 255, and values of 0 to 1, are logged once each.

        Raises:
            BackboneInputError: If a value is below 0, as in normalized images.
        """
        if not self.looks_left:
            return
        low, high = torch.stack([x.detach().min(), x.detach().max()]).tolist()
        if low < 0:
            raise BackboneInputError(
                f'input down to {low:.3f}, expected RGB in 0..255, which {self.name} '
                f'normalizes; take mean and std out of the data preprocessor{self.remedy}')
        self.looks_left -= high > 0  # images without data say nothing
        if high > 255:
            self._say('above', f'up to {high:g}, as of 16 bits a pixel')
        elif 0 < high <= 1:
            self._say('shares', f'up to {high:g}, as if scaled to 0..1')

    def _say(self, kind: str, found: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            print_log(f'{self.name}: input {found}; expected RGB in 0..255, which it normalizes. '
                      f'Scale the images to 0..255{self.remedy}', logger='current',
                      level=logging.WARNING)
