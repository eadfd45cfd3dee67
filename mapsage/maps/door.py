"""Comparison of the inputs of a prediction with the passport of its model, before the first window.

Other programs that read scenes for a model use it as well: suggestions of labels and embeddings.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Union

import numpy as np

from mapsage.geo import GeoError, Raster, RasterBlockError, facts_of
from mapsage.geo.passport import Finding, compare
from mapsage.geo.places.dates import spread_evenly
from mapsage.geo.scene_facts import describe_reading, images_by_sensor, sample_quantiles

from .description import Bands
from .errors import PredictError
from .inputs import Scene

# Largest number of images of a sensor, or of a mosaic, that are examined.
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
        self._trusted, self._say = trusted, say
        self._parts: Mapping[str, Any] = passport['parts'] if passport else {}
        # What training had of single scenes.
        self._trained: Mapping[str, Any] = self._parts.get('', {})
        self.findings: Dict[str, List[Finding]] = {}

    def bands_of(
        self, bands: Bands, units: Optional[str] = None, chosen: Optional[Sequence[int]] = None
    ) -> Bands:
        """Return the bands of a model as a command line says, in the order of the training's names.

        Args:
            bands: Bands of the model.
            units: Unit of the command line; None for the unit of the training.
            chosen: Band numbers of the command line, whose order stays; None for those of the model.
        """
        bands = replace(bands, units=units or bands.units)
        if chosen:
            return replace(bands, chosen=tuple(chosen))
        names = tuple(self._trained.get('bands') or ())
        return replace(bands, names=names) if len(names) == bands.count else bands

    def gsd(self, gsd: Union[None, float, str]) -> Optional[float]:
        """Return the pixel size of ``--gsd``, for ``'auto'`` the size in the passport.

        Raises:
            PredictError: If the passport has none.
        """
        if gsd != 'auto':
            return None if gsd is None else float(gsd)
        if self._trained.get('pixel') is None:
            raise PredictError(
                '--gsd auto takes the pixel size of the training from the passport of the model, '
                'which has none. Give it in meters, such as --gsd 10.'
            )
        return float(self._trained['pixel'][1])

    def examine(self, scene: Scene, is_resized: bool = False) -> None:
        """Examine an opened input.

        Args:
            scene: The input.
            is_resized: Whether the model sees it in another size than the file's.
        """
        for sensor, images in images_by_sensor([scene.raster]).items():
            for text in describe_reading(images):
                self._say(text)
            if not self._parts:
                continue
            trained = self._parts.get(sensor)
            for image in spread_evenly(images, _MOST):
                text = f'{image.path} is of {sensor!r}, of which training had no image.'
                findings = (
                    [Finding('sensor', text)]
                    if trained is None
                    else compare(trained, facts_of(image), _quantiles(image), not is_resized)
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


def _quantiles(raster: Raster) -> Optional[np.ndarray]:
    """Return the quantiles of an image; None on a server, or if it is damaged."""
    if raster.is_remote:
        return None
    try:
        return sample_quantiles(raster)
    except (GeoError, RasterBlockError):
        # The map has a hole there, and says so.
        return None
