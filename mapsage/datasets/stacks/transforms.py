"""Transforms of scene stacks: loading a window, dropping dates, packing.

They run in the loader's workers. `DropDates` draws from NumPy's global state, which the run seeds
for every sample.

Shapes:
    img     (side, side, channels): pixels of all dates, then a plane of valid pixels for each date
    days    day numbers of all dates, 0 for a missing date
"""

from __future__ import annotations

import inspect
import os
from typing import Any, Dict, List

import numpy as np
from mmcv.transforms import BaseTransform
from mmseg.datasets.transforms import PackSegInputs
from mmseg.registry import TRANSFORMS

from mapsage.geo import GeoError, suffix_of
from mapsage.geo.stacks import NO_DAY, StackLayout


@TRANSFORMS.register_module()
class LoadSceneStack(BaseTransform):
    """Transform that reads the image of a window of ``SceneStackDataset``.

    Required keys: ``stack``, ``window``. Added: ``img`` (window, window, channels), uint8 or
    float32; ``valid``, bool (window, window), where any date has data; ``days`` and ``site``
    (longitude and latitude of the window's center in degrees), which ``PackStackInputs`` hands to
    the data preprocessor; ``img_shape``, ``ori_shape``; ``img_path``, a name for the window:
    ``PLACE_COLUMN_ROW.tif``.
    """

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        """Add the image to ``results``, and return them.

        Raises:
            RasterBlockError: If a file is damaged in this window.
        """
        column, row, side = results['window']
        stack = results['stack']
        values, valid = stack.read(column, row, side, side)
        # A view: dozens of channels are slow to move behind the pixels, and packing moves them back
        # to the front.
        image = values.transpose(1, 2, 0)
        results['img'], results['valid'] = image, valid
        results['stack_layout'] = stack.layout
        results['days'] = stack.days
        results['site'] = stack.site(column + side / 2, row + side / 2)
        results['img_shape'] = results['ori_shape'] = image.shape[:2]
        results['img_path'] = os.path.join(
            os.path.dirname(results['scene']),
            f'{stack.place.name}_{column}_{row}{suffix_of(results["scene"])}',
        )
        return results


@TRANSFORMS.register_module()
class DropDates(BaseTransform):
    """Transform that removes dates at random, so that a model does not depend on any of them.

    The dates that remain move up, so that missing dates are at the end. Pixels that lose their last
    date are ignored in the labels. For training, after ``LoadSceneStack``.

    Args:
        prob: Probability that a date is removed.
        keep: Smallest number of dates of a sensor that remain, of those that it has.

    Raises:
        ValueError: If ``prob`` is not in 0 .. 1, or ``keep`` is negative.
    """

    def __init__(self, prob: float = 0.2, keep: int = 1) -> None:
        if not 0 <= prob <= 1 or keep < 0:
            raise ValueError(
                f'DropDates: prob={prob} and keep={keep}, expected a probability and '
                'a number of dates, at least 0.'
            )
        self.prob, self.keep = prob, keep

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        """Remove dates from ``img`` and ``days``, and return ``results``."""
        layout: StackLayout = results['stack_layout']
        image, days = results['img'], list(results['days'])
        remaining = np.zeros_like(image)
        remaining_days = [NO_DAY] * layout.dates
        channel = date = 0
        for sensor in layout.sensors:
            bands, valid = len(sensor.bands), layout.pixel_channels + date
            for position, old in enumerate(
                self._draw(image[..., valid : valid + sensor.max_dates])
            ):
                remaining[..., channel + position * bands : channel + (position + 1) * bands] = (
                    image[..., channel + old * bands : channel + (old + 1) * bands]
                )
                remaining[..., valid + position] = image[..., valid + old]
                remaining_days[date + position] = days[date + old]
            channel += sensor.max_dates * bands
            date += sensor.max_dates
        results['img'], results['days'] = remaining, tuple(remaining_days)
        if 'gt_seg_map' in results:
            empty = ~remaining[..., layout.pixel_channels :].any(-1)
            if empty.any():
                results['gt_seg_map'] = np.where(empty, np.uint8(255), results['gt_seg_map'])
        return results

    def _draw(self, valid: np.ndarray) -> List[int]:
        """Return the positions of the dates that remain.

        Args:
            valid: Valid pixels of a sensor's dates, (height, width, dates).
        """
        has_data = np.flatnonzero(valid.any((0, 1)))
        # As many numbers for every sample, so that the next transform draws the same ones.
        draws = np.random.random_sample((valid.shape[-1],))[: len(has_data)]
        remains = draws >= self.prob
        # Of those that would go, the largest numbers stay.
        missing = min(self.keep, len(has_data)) - int(remains.sum())
        if missing > 0:
            remains[np.argsort(np.where(remains, -1, draws))[::-1][:missing]] = True
        return [int(position) for position in has_data[remains]]

    def __repr__(self) -> str:
        return f'{type(self).__name__}(prob={self.prob}, keep={self.keep})'


@TRANSFORMS.register_module()
class PackStackInputs(PackSegInputs):
    """MMSegmentation's ``PackSegInputs`` with the dates and the position of a stack.

    Args:
        meta_keys: Further keys of the metainfo, in addition to those of ``PackSegInputs``, ``days``
            and ``site``.
    """

    def __init__(self, meta_keys: tuple = ()) -> None:
        standard = inspect.signature(PackSegInputs.__init__).parameters['meta_keys'].default
        super().__init__((*standard, 'days', 'site', *meta_keys))

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        """Return the packed sample.

        Raises:
            GeoError: If the pipeline does not begin with ``LoadSceneStack``.
        """
        if 'days' not in results:
            raise GeoError(
                'PackStackInputs got an image without dates; begin the pipeline with '
                'LoadSceneStack, or pack with PackSegInputs.'
            )
        return super().transform(results)
