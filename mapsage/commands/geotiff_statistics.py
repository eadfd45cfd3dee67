"""Print statistics of the bands of scenes, with mean and std as a config needs them.

python tools/geotiff_statistics.py SCENE... [--bands 1 2 3] [--samples PIXELS]
python tools/geotiff_statistics.py --config CONFIG     the sensors of its SceneStackDataset
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Dict, Iterable, List, Optional, Sequence, Tuple

from mapsage.base.console import accept_any_text

if TYPE_CHECKING:
    from mapsage.datasets import SceneStackDataset
    from mapsage.geo import BandStatistics


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run the program with a command line (default: ``sys.argv``)."""
    accept_any_text()
    parser = argparse.ArgumentParser(description='Statistics of the bands of scenes.')
    parser.add_argument(
        'scenes', nargs='*', help='files, folders of them, and other names that GDAL opens'
    )
    parser.add_argument(
        '--bands',
        nargs='+',
        type=int,
        help='bands counted from 1, in the order of the config (default: all but alpha)',
    )
    parser.add_argument(
        '--samples',
        type=int,
        default=50000000,
        metavar='PIXELS',
        help='largest number of pixels to read (default: 50,000,000)',
    )
    parser.add_argument(
        '--config',
        metavar='CONFIG',
        help='config whose train_dataloader has a SceneStackDataset, in place of '
        'scenes; clouded pixels do not count',
    )
    args = parser.parse_args(argv)
    if bool(args.scenes) == bool(args.config) or (args.config and args.bands):
        parser.error('expected SCENE..., or --config CONFIG without --bands')
    if args.config:
        _print_sensors(args.config, args.samples)
        return
    from mapsage.geo import GeoError, RasterBlockError, band_statistics, match

    paths = [path for scene in args.scenes for path in match(scene)]
    try:
        statistics = band_statistics(paths, args.bands, args.samples)
    except (GeoError, RasterBlockError) as error:
        sys.exit(f'{type(error).__name__}: {error}')
    print(f'{len(paths)} scene(s), {statistics.pixels:,} valid pixels')
    _print_table(statistics)
    print(f'mean={_as_list(statistics.mean)}, std={_as_list(statistics.std)}')


def _print_sensors(config: str, samples: int) -> None:
    """Print the statistics of the sensors of a config's training places."""
    statistics, text = _statistics_of_config(config, samples)
    for sensor, result in statistics.items():
        print(f'{sensor}: {result.pixels:,} valid pixels')
        _print_table(result)
    print(text)


def _statistics_of_config(path: str, samples: int) -> Tuple[Dict[str, BandStatistics], str]:
    """Return the statistics of a config's sensors, by name, and the settings to write into it.

    Args:
        path: Path of the config.
        samples: Approximate upper limit of the number of pixels that are read.

    The program ends with a message if the config has no places, or they cannot be read.
    """
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


def _print_table(statistics: BandStatistics) -> None:
    columns = [
        statistics.mean,
        statistics.std,
        statistics.minimum,
        statistics.percentile_2,
        statistics.percentile_98,
        statistics.maximum,
    ]
    print('band' + ''.join(f'{name:>12}' for name in ('mean', 'std', 'min', '2 %', '98 %', 'max')))
    for band, row in zip(statistics.bands, zip(*columns)):
        print(f'{band:4}' + ''.join(f'{value:12.6g}' for value in row))


def _as_list(values: Iterable[float]) -> str:
    return f'[{", ".join(f"{value:.6g}" for value in values)}]'


def run() -> None:
    """Run the command line and exit."""
    main()
