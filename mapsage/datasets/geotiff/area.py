"""The area of interest of ``GeoTiffDataset``, in the pixels of each of its scenes.

The polygons are read and burned by `mapsage/geo/aoi.py`. This module remembers which scenes the
polygons do not touch, because that is often a wrong file or CRS.
"""

from __future__ import annotations

import logging
from typing import Dict, Optional

from mmengine.dist import get_dist_info
from mmengine.logging import print_log

from mapsage.geo import AreaOfInterest, GeoError, Raster, SceneArea, locate


class SceneAreas:
    """An area of interest in the pixels of many scenes; without an area, every pixel counts.

    Args:
        root: Folder that ``path`` is relative to.
        path: Path of the polygons, or None.

    Raises:
        GeoError: If the polygons cannot be used.
    """

    def __init__(self, root: Optional[str], path: Optional[str]) -> None:
        self._area = None if path is None else AreaOfInterest(locate(root, path))
        self._areas: Dict[str, SceneArea] = {}
        # Scenes that the area does not touch, each with a sentence for the log.
        self._missed: Dict[str, str] = {}

    def of(self, scene: Raster) -> Optional[SceneArea]:
        """Return the area in the pixels of a scene, or None if there is no area of interest.

        Raises:
            GeoError: If the scene has no georeference.
        """
        if self._area is None:
            return None
        area = self._areas[scene.path] = self._area.of_scene(scene)
        if not area.meets(0, 0, scene.width, scene.height):
            self._missed[scene.path] = self._area.describe_miss(scene)
        return area

    def check(self) -> None:
        """Warn of scenes that the area does not touch.

        Raises:
            GeoError: If the area touches no scene.
        """
        lines = list(self._missed.values())
        if lines and len(lines) == len(self._areas):
            raise GeoError(
                f'{lines[0]}. Check that the files of aoi= and scenes= belong together '
                'and that each has the CRS it was made in.'
            )
        if lines and not get_dist_info()[0]:
            print_log(
                f'{lines[0]}: no window of this scene'
                + (f' and {len(lines) - 1} more' * (len(lines) > 1))
                + ' is used.',
                logger='current',
                level=logging.WARNING,
            )
