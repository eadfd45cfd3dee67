"""Mean and standard deviation of the bands of each sensor, for the normalization in a config."""

from __future__ import annotations

from typing import Dict, Iterator, List, Mapping, Sequence, Union

import numpy as np

from mapsage.geo import BandStatistics, GeoError, band_wavelengths, tally_bands
from mapsage.geo.places.place_raster import PlaceRaster, bands_of_files

from .dataset import SceneStackDataset

# Side of the windows that are read, and of those drawn from large places, in pixels.
_WINDOW = 256


def sensor_statistics(
    dataset: SceneStackDataset, samples: int = 50000000
) -> Dict[str, BandStatistics]:
    """Return the statistics of the bands of each sensor over their valid pixels, by its name.

    Clouded pixels and missing dates do not count. If the places have more than ``samples`` pixels,
    counted for all dates, windows are drawn with a fixed seed.

    Args:
        dataset: Dataset with its places loaded.
        samples: Approximate upper limit of the number of pixels that are read.

    Raises:
        GeoError: If a sensor has no valid pixel.
    """
    stacks: List[PlaceRaster] = [facts['stack'] for facts in dataset.scene_facts]
    windows = [
        (stack, column, row)
        for stack in stacks
        for row in range(0, stack.height, _WINDOW)
        for column in range(0, stack.width, _WINDOW)
    ]
    count = max(1, min(len(windows), samples // (_WINDOW**2 * dataset.layout.dates)))
    chosen = sorted(np.random.RandomState(0).choice(len(windows), count, replace=False).tolist())
    reads = [windows[index] for index in chosen]
    statistics = {}
    first = date = 0
    for sensor in dataset.layout.sensors:
        bands = len(sensor.bands)

        def values(
            first: int = first, date: int = date, bands: int = bands, dates: int = sensor.max_dates
        ) -> Iterator[np.ndarray]:
            for stack, column, row in reads:
                pixels, _ = stack.read(column, row, _WINDOW, _WINDOW)
                for number in range(dates):
                    valid = pixels[stack.layout.pixel_channels + date + number] != 0
                    yield pixels[first + number * bands : first + (number + 1) * bands, valid]

        result = tally_bands(values(), tuple(range(1, bands + 1)), count * sensor.max_dates)
        if result is None:
            raise GeoError(
                f'sensor {sensor.name!r} has no valid pixel among {count} window(s) of '
                f'{len(stacks)} place(s), the first {stacks[0].place.name!r}; check '
                'its files, clouds and no-data values.'
            )
        statistics[sensor.name] = result
        first += sensor.max_dates * bands
        date += sensor.max_dates
    return statistics


def sensor_wavelengths(dataset: SceneStackDataset) -> Dict[str, List[float]]:
    """Return the wavelengths of the bands in micrometers, of sensors that have them in their files.

    The first image of a sensor counts, and its tags (``mapsage.geo.band_wavelengths``).

    Args:
        dataset: Dataset with its places loaded.
    """
    wavelengths = {}
    for name, sensor in dataset.sensors.items():
        image = next(
            image for facts in dataset.scene_facts for image in facts['stack'].place.images[name]
        )
        of_files = [band_wavelengths(path, bands) for path, bands in bands_of_files(image, sensor)]
        known = [values for values in of_files if values is not None]
        if len(known) == len(of_files):
            wavelengths[name] = [number for values in known for number in values]
    return wavelengths


def format_config(
    statistics: Dict[str, BandStatistics], wavelengths: Mapping[str, Sequence[float]]
) -> str:
    """Return mean and std as a config of ``StackDataPreProcessor`` needs them, and wavelengths."""
    means, deviations = (
        ', '.join(f'{sensor}={_as_list(values)}' for sensor, values in by_sensor)
        for by_sensor in (
            [(sensor, result.mean) for sensor, result in statistics.items()],
            [(sensor, result.std) for sensor, result in statistics.items()],
        )
    )
    text = f'mean=dict({means}),\nstd=dict({deviations})'
    if wavelengths:
        listed = ', '.join(f'{sensor}={_as_list(values)}' for sensor, values in wavelengths.items())
        text += f',\nwavelengths=dict({listed})'
    return text


def _as_list(values: Union[np.ndarray, Sequence[float]]) -> str:
    return f'[{", ".join(f"{value:.6g}" for value in values)}]'
