"""The demo beside its training: make its data before, and a map of its scene after.

python tools/demo.py data                           the demo's data, into data/demo
python tools/demo.py map work_dirs/RUN/CONFIG.py data/demo/scene.tif

`scripts/start_8card_training.sh` lets the launcher run both.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Optional, Sequence

from mapsage.base.console import examples
from mapsage_launcher.shipped import SHIPPED, program


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = argparse.ArgumentParser(
        description="Make the demo's data, or a map of its scene.", **examples(__doc__)
    )
    words = parser.add_subparsers(dest='word', metavar='data|map', required=True)
    data = words.add_parser('data', help='make the data')
    data.add_argument(
        'folder', nargs='?', default='data/demo', help='folder to write (default: data/demo)'
    )
    map_parser = words.add_parser('map', help='make a map with the last checkpoint of a training')
    map_parser.add_argument('config', help='config that the training has written into its work dir')
    map_parser.add_argument('scene', help='scene to map; its labels are beside it')
    map_parser.add_argument('--accelerator', help="as of mapsage predict (default: the config's)")
    args = parser.parse_args(argv)
    if args.word == 'data':
        from mapsage.extras.demo import make_demo_data

        make_demo_data.main([args.folder])
        return 0
    return make_map(Path(args.config), Path(args.scene), args.accelerator)


def make_map(config: Path, scene: Path, accelerator: Optional[str]) -> int:
    """Make a map of a scene into the folder ``map`` of the config's; return the exit status.

    The last lines are the command that shows scene, map and errors. Without a checkpoint or a scene
    there is nothing to do.
    """
    from mapsage.commands import predict

    work_dir = config.parent
    last = work_dir / 'last_checkpoint'
    if not last.is_file() or not scene.is_file():
        return 0
    options = ['--out', str(work_dir / 'map'), '--polygons', '--overwrite']
    options += ['--accelerator', accelerator] if accelerator else []
    status = predict.main([str(config), last.read_text().strip(), str(scene), *options])
    if not status:
        labels = scene.with_name(f'{scene.stem}_label.tif')
        words = [*_viewer(), str(work_dir / 'map'), '--truth', str(labels), '--reduce-zero-label']
        print('\nThe scene, its map and where the map is wrong, in a browser:')
        print(f'  {" ".join(map(shlex.quote, words))}')
    return status


def _viewer() -> Sequence[str]:
    """Return the words that start the viewer from the current folder."""
    words = program('view').split()
    if words[0] == 'mapsage':
        return words
    script = words[1] if Path.cwd() == SHIPPED else str(SHIPPED / words[1])
    return [sys.executable, script]


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
