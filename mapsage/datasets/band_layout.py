"""The order of an image's axes, changed by OpenCV, which is several times as fast as NumPy.

Shapes:
    bands first  (bands, height, width)
    bands last   (height, width, bands)
"""

from __future__ import annotations

import cv2
import numpy as np

# Most channels of an image that every OpenCV makes (CV_CN_MAX: 128 since version 5, 512 before).
MOST_CHANNELS = 128


def bands_last(values: np.ndarray) -> np.ndarray:
    """Return (bands, height, width) as a contiguous array (height, width, bands)."""
    if 1 < len(values) <= MOST_CHANNELS:
        # Much faster than NumPy's copy of the transposed array.
        return cv2.merge(list(values))
    return np.ascontiguousarray(values.transpose(1, 2, 0))


def bands_first(image: np.ndarray) -> np.ndarray:
    """Return an image (height, width, bands) as a new contiguous array (bands, height, width)."""
    # A mirrored image is a view that runs backwards, which OpenCV would copy slowly.
    mirrored = [image.strides[axis] < 0 for axis in (0, 1)]
    if any(mirrored):
        image = image[:: -1 if mirrored[0] else 1, :: -1 if mirrored[1] else 1]
        image = cv2.flip(
            image, {(True, False): 0, (False, True): 1, (True, True): -1}[mirrored[0], mirrored[1]]
        )
    bands = np.empty((image.shape[2], *image.shape[:2]), image.dtype)
    cv2.split(image, list(bands))
    return bands
