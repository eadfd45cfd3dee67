"""tools/geotiff_statistics.py --config: statistics of the sensors of a config's training places."""

from __future__ import annotations

import sys
from typing import Dict, List, Tuple

from mmengine.config import Config
from mmengine.registry import DefaultScope

from mapsage.base.errors import UserError
from mapsage.datasets import SceneStackDataset
from mapsage.datasets.stacks.statistics import (
    format_config,
    sensor_statistics,
    sensor_wavelengths,
)
from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.loading.build import build_dataset, datasets_of_scenes
from mapsage.geo import BandStatistics


def statistics_of_config(path: str, samples: int) -> Tuple[Dict[str, BandStatistics], str]:
    """Return the statistics of a config's sensors, by name, and the settings to write into it.

    Args:
        path: Path of the config.
        samples: Approximate upper limit of the number of pixels that are read.

    The program ends with a message if the config has no places, or they cannot be read.
    """
    try:
        cfg = Config.fromfile(path)
        with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmengine')):
            dataset = build_dataset(cfg.train_dataloader.dataset)
        stacks: List[SceneStackDataset] = [
            scenes
            for scenes in datasets_of_scenes(dataset)
            if isinstance(scenes, SceneStackDataset)
        ]
        if not stacks:
            raise ConfigError(
                f'{path} has no SceneStackDataset in train_dataloader; name scenes '
                f'in place of --config for other datasets.'
            )
        statistics = sensor_statistics(stacks[0], samples)
        wavelengths = sensor_wavelengths(stacks[0])
    except (UserError, FileNotFoundError) as error:
        sys.exit(f'{type(error).__name__}: {error}')
    return statistics, format_config(statistics, wavelengths)
