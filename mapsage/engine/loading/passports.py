"""The passport of a training, and the comparison of a dataset with the passport of a checkpoint.

What a passport has, and what is wrong or unusual, is in `mapsage/geo/passport.py`. Images of datasets
that are no scenes are read like scenes, some of them.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Dict, List, Mapping, Tuple

from mapsage.datasets import GeoTiffDataset
from mapsage.datasets.geotiff.pixel_source import PixelSource
from mapsage.geo import GeoError, RasterBlockError, SceneFacts, open_scene
from mapsage.geo.passport import VERSION, Finding, compare, describe_part
from mapsage.geo.places.dates import spread_evenly
from mapsage.geo.scene_facts import Sampled
from mapsage.host.dataset_parts import inner_datasets, listed_samples

from .build import datasets_of_scenes

_PICTURES = 16


def passport_of(dataset: object) -> Dict[str, Any]:
    """Return the passport of a training dataset, also inside of wrappers, as JSON values."""
    return dict(
        version=VERSION,
        parts={
            sensor: describe_part(facts, [rows for _, rows in sampled])
            for sensor, (facts, sampled) in _sources(dataset).items()
        },
        classes={
            name: round(share, 4)
            for scenes in datasets_of_scenes(dataset)
            for name, share in scenes.class_shares.items()
        },
    )


def compare_with_passport(dataset: object, passport: Mapping[str, Any]) -> List[Finding]:
    """Return how the images of a dataset differ from a passport, the first of each kind."""
    first: Dict[str, Finding] = {}
    for sensor, (_, sampled) in _sources(dataset).items():
        for facts, rows in sampled if sensor in passport['parts'] else ():
            for finding in compare(passport['parts'][sensor], facts, rows):
                first.setdefault(finding.kind, finding)
    return list(first.values())


def _sources(dataset: object) -> Dict[str, Tuple[List[SceneFacts], List[Sampled]]]:
    """Return facts and samples of the images by sensor; unreadable images are left out."""
    sources: Dict[str, Tuple[List[SceneFacts], List[Sampled]]] = {}
    for inner in inner_datasets(dataset):
        by_sensor = (
            inner.pixel_sources if isinstance(inner, GeoTiffDataset) else {'': _pictures(inner)}
        )
        for sensor, source in by_sensor.items():
            # The training reports a damaged file when it needs the pixels.
            with suppress(GeoError, RasterBlockError, OSError):
                if source.sampled:
                    facts, sampled = sources.setdefault(sensor, ([], []))
                    facts += source.facts
                    sampled += source.sampled
    return sources


def _pictures(dataset: Any) -> PixelSource:
    paths = [str(info['img_path']) for info in listed_samples(dataset) if 'img_path' in info]
    rasters = []
    for path in spread_evenly(paths, _PICTURES):
        with suppress(GeoError, OSError):
            rasters.append(open_scene(path))
    return PixelSource(rasters)
