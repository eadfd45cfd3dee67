"""Write the synthetic demo dataset, and a georeferenced scene to predict a map of.

python tools/make_demo_data.py data/demo
python tools/make_demo_data.py data/geotiff --geotiff
python tools/make_demo_data.py data/change --change
python tools/make_demo_data.py data/crops --stacks
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Optional, Sequence

from mapsage.base.console import accept_any_text

# Fields of DemoParams, and of NeighborParams if they differ, in mapsage.datasets, which imports
# PyTorch.
_TILES = dict(seed=0, train_scenes=24, val_scenes=8, scene_size=640)
_NEIGHBOR_SIZE = 1000


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Parse a command line (default: ``sys.argv``); options that are not on it are None."""
    parser = argparse.ArgumentParser(
        description='Write synthetic aerial tiles with masks, in the folders of LoveDA, and '
        'a larger georeferenced scene, scene.tif. Or, with --geotiff, six neighboring scenes of '
        'four bands and 16 bits, with polygons as labels. Or, with --change, pairs of tiles of two '
        'dates with labels of change, and a pair of scenes. Or, with --stacks, places with fields '
        'of crops, from two sensors at six dates.'
    )
    parser.add_argument(
        'root',
        nargs='?',
        help='folder to write (default: data/demo, or data/geotiff, data/change or data/crops)',
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument('--geotiff', action='store_true', help='scenes and polygons, no tiles')
    kinds.add_argument('--change', action='store_true', help='pairs of two dates')
    kinds.add_argument(
        '--stacks', action='store_true', help='places with images of two sensors at six dates'
    )
    parser.add_argument('--seed', type=int, help=f'default: {_TILES["seed"]}')
    parser.add_argument(
        '--scene-size',
        type=int,
        metavar='PIXELS',
        help=f'default: {_TILES["scene_size"]}, or {_NEIGHBOR_SIZE}',
    )
    tiles = parser.add_argument_group('tiles')
    tiles.add_argument('--train-scenes', type=int, help=f'default: {_TILES["train_scenes"]}')
    tiles.add_argument('--val-scenes', type=int, help=f'default: {_TILES["val_scenes"]}')
    args = parser.parse_args(argv)
    tile_options = {
        '--train-scenes': args.train_scenes,
        '--val-scenes': args.val_scenes,
    }
    unused = [
        option
        for option, value in tile_options.items()
        if (args.geotiff or args.stacks) and value is not None
    ]
    if args.stacks and args.scene_size is not None:
        unused.append('--scene-size')
    if unused:
        kind = '--stacks writes places' if args.stacks else '--geotiff writes whole scenes'
        parser.error(f'{", ".join(unused)}: {kind} and no tiles; leave out')
    return args


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run the program with a command line (default: ``sys.argv``)."""
    accept_any_text()
    options = vars(parse_args(argv))
    from mapsage.extras.demo import (
        ChangeParams,
        CropParams,
        DemoParams,
        NeighborParams,
        write_change_pairs,
        write_crop_places,
        write_demo_data,
        write_neighbor_scenes,
    )

    geotiff, change, stacks = (options.pop(name) for name in ('geotiff', 'change', 'stacks'))
    root = options.pop('root') or (
        'data/geotiff'
        if geotiff
        else 'data/change'
        if change
        else 'data/crops'
        if stacks
        else 'data/demo'
    )
    parameters = {name: value for name, value in options.items() if value is not None}
    start = time.perf_counter()
    try:
        if geotiff:
            size = NeighborParams(**parameters).scene_size
            written = ['scenes'] * write_neighbor_scenes(root, NeighborParams(**parameters))
            summary = f'6 scenes of {size}x{size} pixels, labels.gpkg and truth.tif'
        elif change:
            pairs = ChangeParams(**parameters)
            written = ['pairs'] * write_change_pairs(root, pairs)
            tiles = ' and '.join(f'{n} {split}' for split, n in pairs.tiles().items())
            summary = f'{tiles} pairs of tiles, and pair/ of {pairs.pair_size}x{pairs.pair_size}'
        elif stacks:
            crops = CropParams(**parameters)
            written = ['places'] * write_crop_places(root, crops)
            summary = f'{crops.train_places} train and {crops.val_places} val places'
        else:
            demo = DemoParams(**parameters)
            written = write_demo_data(root, demo)
            tiles = ' and '.join(f'{n} {split}' for split, n in demo.tiles().items())
            summary = f'{tiles} tiles, ' * ('tiles' in written) + 'scene.tif and scene_label.tif'
    except OSError as error:
        sys.exit(f'error: {root} cannot be written: {error}. Start this in a folder that can be.')
    except ValueError as error:
        sys.exit(f'error: {error}')
    if not written:
        print(f'{root}: already complete')
        return
    print(f'{root}: wrote {summary} in {time.perf_counter() - start:.1f} s')


def run() -> None:
    """Run the command line and exit."""
    main()
