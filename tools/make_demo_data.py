"""Write the synthetic demo dataset, and a georeferenced scene to make a map of.

    python tools/make_demo_data.py data/demo
"""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mapsage.console import accept_any_text  # noqa: E402
from mapsage.datasets import DemoParams, write_demo_data  # noqa: E402


def parse_args() -> argparse.Namespace:
    default = DemoParams()
    parser = argparse.ArgumentParser(
        description='Write synthetic aerial tiles with masks, in the folders of LoveDA, and '
        'a larger georeferenced scene, scene.tif.',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('root', nargs='?', default='data/demo', help='folder to write')
    parser.add_argument('--seed', type=int, default=default.seed)
    parser.add_argument('--train-scenes', type=int, default=default.train_scenes)
    parser.add_argument('--val-scenes', type=int, default=default.val_scenes)
    parser.add_argument('--scene-size', type=int, default=default.scene_size, help='pixels')
    parser.add_argument('--tile-size', type=int, default=default.tile_size, help='pixels')
    return parser.parse_args()


def main() -> None:
    accept_any_text()
    options = vars(parse_args())
    root = options.pop('root')
    params = DemoParams(**options)
    start = time.perf_counter()
    written = write_demo_data(root, params)
    if not written:
        print(f'{root}: already complete')
        return
    tiles = ' and '.join(f'{n} {split}' for split, n in params.tiles().items()) + ' tiles, '
    print(f"{root}: wrote {tiles * ('tiles' in written)}scene.tif and scene_label.tif in "
          f'{time.perf_counter() - start:.1f} s')


if __name__ == '__main__':
    main()
