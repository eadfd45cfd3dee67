"""Augmentation of stacks of two dates: exchanged dates, different light, shifted images.

The transforms work on any stack of one sensor with two dates. They stand behind the loading
transforms and in front of ``PackStackInputs``, and draw from NumPy's global state, which the run
seeds for every sample.

Shapes:
    img    (height, width, 2 bands + 2): bands of both dates, then their valid pixels
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, Sequence, Tuple

import numpy as np
from mmcv.transforms import BaseTransform
from mmseg.registry import TRANSFORMS

from mapsage.geo.change_classes import CHANGED, UNCHANGED, ChangeClassError, reversed_classes
from mapsage.geo.stacks import StackLayout


class TwoDates:
    """Channels of the two dates of a stack's image.

    Args:
        results: Sample with ``img`` (height, width, channels) and ``stack_layout``: one sensor with
            two dates.

    Raises:
        ChangeClassError: If there is another number of sensors or dates.
    """

    def __init__(self, results: Mapping[str, Any]) -> None:
        layout: StackLayout = results['stack_layout']
        if [sensor.max_dates for sensor in layout.sensors] != [2]:
            raise ChangeClassError(
                f'{layout}, expected one sensor with max_dates=2 for a pair of dates.'
            )
        self._image: np.ndarray = results['img']
        self.bands = len(layout.sensors[0].bands)

    def pixels(self, date: int) -> np.ndarray:
        """Return a view (height, width, bands) of the pixels of a date, 0 or 1."""
        return self._image[..., date * self.bands : (date + 1) * self.bands]

    def valid(self, date: int) -> np.ndarray:
        """Return a view (height, width) of the valid pixels of a date, 1 where there is data."""
        return self._image[..., 2 * self.bands + date]


@TRANSFORMS.register_module()
class ExchangeDates(BaseTransform):
    """Transform that exchanges the two dates, as Open-CD's ``MultiImgExchangeTime``.

    From-to labels are exchanged, too: 'forest > building' becomes 'building > forest'. The planes
    of the days stay, because time runs forward.

    Args:
        classes: Classes of the labels. Each needs a reverse among them, or a meaning that does not
            depend on the direction.
        prob: Probability of an exchange.
        symmetric: Names of the classes that mean the same in both directions.
        ignore_index: Label that stays.

    Raises:
        ChangeClassError: If a class has no reverse, such as 'new building'.
    """

    def __init__(
        self,
        classes: Sequence[str] = (UNCHANGED, CHANGED),
        prob: float = 0.5,
        symmetric: Sequence[str] = (UNCHANGED, CHANGED),
        ignore_index: int = 255,
    ) -> None:
        self.prob = prob
        self._table = np.arange(256, dtype=np.uint8)
        reverse = reversed_classes(classes, symmetric)
        self._table[: len(reverse)] = reverse
        self._classes, self._ignored = list(classes), ignore_index

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        """Exchange the dates with probability ``prob``, and return the results."""
        if np.random.rand() >= self.prob:
            return results
        dates = TwoDates(results)
        for plane in (dates.pixels, dates.valid):
            first = plane(0).copy()
            plane(0)[:] = plane(1)
            plane(1)[:] = first
        for key in results.get('seg_fields', []):
            labels = results[key]
            if ((labels >= len(self._classes)) & (labels != self._ignored)).any():
                raise ChangeClassError(
                    f'label {int(labels[labels != self._ignored].max())} of '
                    f'{results.get("img_path")} is none of the classes={self._classes} of '
                    f'ExchangeDates; give it the classes of the dataset.'
                )
            results[key] = self._table[labels]
        return results


@TRANSFORMS.register_module()
class JitterDates(BaseTransform):
    """Transform that changes the light of both dates, independently of each other.

    Works on values of any unit: in each date and band, the distance from the mean of the valid
    pixels is multiplied by ``1 + contrast``, and a part of their standard deviation is added.
    Pixels without data do not change.

    Args:
        contrast: Largest change of contrast, the same in all bands of a date.
        brightness: Largest change of brightness in standard deviations, the same in all bands.
        color: Largest further change of brightness of each band.
        prob: Probability of a change, for each date.
    """

    def __init__(
        self,
        contrast: float = 0.25,
        brightness: float = 0.4,
        color: float = 0.15,
        prob: float = 0.8,
    ) -> None:
        self.contrast, self.brightness, self.color, self.prob = contrast, brightness, color, prob

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        """Change the light of each date with probability ``prob``, and return the results."""
        results['img'] = results['img'].astype(np.float32)
        dates = TwoDates(results)
        for date in (0, 1):
            pixels, valid = dates.pixels(date), dates.valid(date) > 0
            if np.random.rand() >= self.prob or not valid.any():
                continue
            gain = 1 + np.random.uniform(-self.contrast, self.contrast)
            offset = np.random.uniform(-self.brightness, self.brightness) + np.random.uniform(
                -self.color, self.color, dates.bands
            )
            mean, spread = pixels[valid].mean(0), pixels[valid].std(0)
            pixels[valid] = mean + (pixels[valid] - mean) * gain + offset * spread
        return results


@TRANSFORMS.register_module()
class ShiftDate(BaseTransform):
    """Transform that shifts the second date by whole pixels, as images that are badly aligned.

    The labels stay with the first date. Pixels that come from outside the window are 0 and not
    valid.

    Args:
        pixels: Largest shift in each direction. The shift is drawn for each window.
        fixed: Shift to the right and downward that is always used instead of a random one, to
            measure what a shift costs.
        prob: Probability of a shift.
    """

    def __init__(self, pixels: int = 2, fixed: Sequence[int] = (), prob: float = 1.0) -> None:
        if int(pixels) != pixels or pixels < 0 or len(fixed) not in (0, 2):
            raise ChangeClassError(
                f'pixels={pixels} and fixed={fixed}, expected whole pixels from '
                f'0, and two numbers or none.'
            )
        self.pixels, self.prob = int(pixels), prob
        self.fixed = tuple(int(number) for number in fixed)

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        """Shift the second date with probability ``prob``, and return the results."""
        if self.fixed:
            columns, rows = self.fixed
        elif np.random.rand() < self.prob:
            columns, rows = np.random.randint(-self.pixels, self.pixels + 1, 2).tolist()
        else:
            return results
        dates = TwoDates(results)
        for plane in (dates.pixels(1), dates.valid(1)):
            plane[:] = shifted(plane, columns, rows)
        return results


def shifted(plane: np.ndarray, columns: int, rows: int) -> np.ndarray:
    """Return an array (H, W, ...) shifted to the right and downward, with zeros at the edges."""
    height, width = plane.shape[:2]
    result = np.zeros_like(plane)
    source, target = zip(
        *(_ranges(shift, length) for shift, length in ((rows, height), (columns, width)))
    )
    result[target] = plane[source]
    return result


def _ranges(shift: int, length: int) -> Tuple[slice, slice]:
    """Return the pixels of an axis that stay inside, before and after a shift."""
    return (
        slice(max(0, -shift), max(0, min(length, length - shift))),
        slice(max(0, shift), max(0, min(length, length + shift))),
    )
