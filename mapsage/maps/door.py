"""Comparison of the inputs of a prediction with the passport of its model, before the first window.

Other programs that read scenes for a model use it as well: suggestions of labels and embeddings.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from mapsage.geo import GeoError, Mosaic, Raster, RasterBlockError, facts_of
from mapsage.geo.passport import Finding, compare
from mapsage.geo.places import PlaceRaster
from mapsage.geo.scene_facts import sample_quantiles

from .description import Bands
from .errors import PredictError
from .inputs import Scene

# Largest number of scenes of a mosaic that are examined.
_MOST = 32


class Door:
    """Examines inputs, and reports what does not fit the model's training.

    Args:
        passport: Passport of the model, None without one.
        trusted: Whether warnings are left out and other pixel sizes pass (``--trust-scenes``).
        say: Function that prints a line.

    Attributes:
        findings: Differences that were found and not reported yet, by kind.
    """

    def __init__(
        self, passport: Optional[Mapping[str, Any]], trusted: bool, say: Callable[[str], None]
    ) -> None:
        self._passport, self._trusted, self._say = passport, trusted, say
        self.findings: Dict[str, List[Finding]] = {}

    def examine(self, scene: Scene, is_resized: bool = False) -> None:
        """Examine an opened input.

        Args:
            scene: The input.
            is_resized: Whether the model sees it in another size than the file's.
        """
        for sensor, raster in _images(scene.raster):
            if raster.reordered:
                names = ', '.join(facts_of(raster).names)
                self._say(f'{raster.path}: bands are read in the order {names}, by their names')
            if self._passport is None:
                continue
            trained = self._passport['parts'].get(sensor)
            if trained is None:
                text = f'{raster.path} is of {sensor!r}, of which training had no image.'
                self.findings.setdefault('sensor', []).append(Finding('sensor', False, text))
                continue
            findings = compare(
                trained, facts_of(raster), _quantiles(raster), scene.units(sensor), not is_resized
            )
            for finding in findings:
                self.findings.setdefault(finding.kind, []).append(finding)

    def report(self) -> None:
        """Tell the warnings of all inputs.

        Raises:
            PredictError: If an input certainly does not fit.
        """
        for kind, findings in self.findings.items():
            first = next((finding for finding in findings if finding.is_error), findings[0])
            more = f' (and {len(findings) - 1} more)' if len(findings) > 1 else ''
            if first.is_error and not (kind == 'pixel' and self._trusted):
                raise PredictError(f'{first.text}{more}')
            if not self._trusted:
                self._say(f'warning: {first.text}{more}')
        self.findings.clear()


def as_in_training(
    bands: Bands,
    passport: Optional[Mapping[str, Any]],
    units: Optional[str] = None,
    chosen: Optional[Sequence[int]] = None,
) -> Bands:
    """Return bands as a command line and the passport say.

    Args:
        bands: Bands of the model.
        passport: Passport of the model, whose names of bands decide their order; None without one.
        units: Unit of the command line; None for the unit of the training.
        chosen: Band numbers of the command line, whose order stays; None for the bands of the model.
    """
    bands = replace(bands, units=units or bands.units)
    if chosen:
        return replace(bands, chosen=tuple(chosen))
    names = _of_scenes(passport).get('bands') or ()
    return replace(bands, names=tuple(names)) if len(names) == bands.count else bands


def choose_gsd(
    gsd: Union[None, float, str], passport: Optional[Mapping[str, Any]]
) -> Optional[float]:
    """Return the pixel size of ``--gsd``, for ``'auto'`` the size in the passport.

    Raises:
        PredictError: If the passport has none.
    """
    if gsd != 'auto':
        return None if gsd is None else float(gsd)
    pixel = _of_scenes(passport).get('pixel')
    if pixel is None:
        raise PredictError(
            '--gsd auto takes the pixel size of the training from the passport of the model, which '
            'has none. Give it in meters, such as --gsd 10.'
        )
    return float(pixel[1])


def _of_scenes(passport: Optional[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the part of a passport on single scenes, empty if it has none."""
    return (passport or {}).get('parts', {}).get('') or {}


def _images(raster: Raster) -> Iterator[Tuple[str, Raster]]:
    """Yield the name of the sensor, and the raster, of the images that an input consists of."""
    if isinstance(raster, PlaceRaster):
        for sensor in raster.layout.sensors:
            yield from ((sensor.name, image) for image in raster.scenes_of(sensor.name))
    elif isinstance(raster, Mosaic):
        step = max(1, -(-len(raster.scenes) // _MOST))
        yield from (('', image) for image in raster.scenes[::step])
    else:
        yield '', raster


def _quantiles(raster: Raster) -> Optional[np.ndarray]:
    """Return the quantiles of an image; None on a server, or if it is damaged."""
    if raster.is_remote:
        return None
    try:
        return sample_quantiles(raster)
    except (GeoError, RasterBlockError):
        # The map has a hole there, and says so.
        return None
