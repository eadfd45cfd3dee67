"""What the doctor says of fast copies: whether there is room for them, or what they would gain.

The doctor makes no copies, since they take long and much disk space. For a dataset with `fast_copy`
it estimates their size; for a dataset without, it reads a few windows of a scene both ways.
"""

from __future__ import annotations

import copy
from typing import Any, List, Sequence, Tuple

from mapsage.datasets import GeoTiffDataset
from mapsage.datasets.geotiff.fast_copies import FastCopies
from mapsage.geo import (
    GeoError,
    NotCopiedError,
    Raster,
    RasterBlockError,
    measure_read_times,
    without_secrets,
)

from .finding import Finding

# Least factor between the times of reading that is worth the disk space.
_WORTHWHILE = 1.5


def without_fast_copies(config: Any) -> Tuple[Any, List[Any]]:
    """Return the config of a dataset without ``fast_copy``, and the values that were left out.

    Args:
        config: Config of a dataset, which may contain others.
    """
    config, settings = copy.deepcopy(config), []
    waiting = [config]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if part.get('fast_copy') is not None:
                settings.append(part.pop('fast_copy'))
            waiting += part.values()
        elif isinstance(part, (list, tuple)):
            waiting += part
    return config, settings


def check_fast_copies(
    loader: str, datasets: Sequence[GeoTiffDataset], settings: Sequence[Any]
) -> List[Finding]:
    """Return findings about the fast copies that a training makes, or could make.

    Args:
        loader: Name of the loader.
        datasets: Datasets of scenes of the loader, built without fast copies.
        settings: Values of ``fast_copy`` in the config of the loader.
    """
    if not datasets:
        return []
    if not settings:
        return _recommend(loader, datasets[0]) if loader == 'train_dataloader' else []
    rasters = [path for dataset in datasets for path in dataset.read_rasters()]
    findings = []
    for setting in settings:
        try:
            copies = FastCopies.of_config(setting)
            count, size = copies.missing_bytes(rasters)
        except (GeoError, RasterBlockError) as error:
            findings.append(Finding('problem', f'{loader}: {error}'))
            continue
        findings.append(
            Finding(
                'ok',
                f'{loader}: '
                + (
                    f'the start makes {count} fast copies, about {size / 1e6:,.0f} MB, in {copies.folder}'
                    if count
                    else f'all fast copies are in {copies.folder}'
                ),
            )
        )
    return findings


def _recommend(loader: str, dataset: GeoTiffDataset) -> List[Finding]:
    """Read windows of the first scene both ways; return a note if a copy is much faster."""
    scene = dataset.scene_facts[0]['scene']
    try:
        times = measure_read_times(scene, dataset.window)
    except (NotCopiedError, RasterBlockError):
        return []
    gain = times.original / max(times.copy, 1e-9)
    if gain < _WORTHWHILE:
        return []
    rows, columns = Raster(scene).blocks
    clock = 'elapsed time' if times.is_remote else 'processor time'
    return [
        Finding(
            'note',
            f'{loader}: {without_secrets(scene)} has blocks of {columns} x {rows} pixels; '
            f'reading a window of {dataset.window} takes {times.original * 1e3:.1f} ms of {clock}, and '
            f'{times.copy * 1e3:.1f} ms from a fast copy ({gain:.1f} times faster)',
            "set fast_copy=dict(folder='/local/copies') in the dataset (docs/tutorials/scenes.md)",
        )
    ]
