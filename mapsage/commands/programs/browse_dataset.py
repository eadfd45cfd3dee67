"""Draw samples of a config's dataset with their labels as overlays, augmentation included.

python tools/browse_dataset.py CONFIG [--split train|val|test] [--output-dir DIR]
"""

from __future__ import annotations

import argparse
from typing import Optional, Sequence

from mapsage.commands.options import ConfigOptions


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run the program with a command line (default: ``sys.argv``)."""
    parser = argparse.ArgumentParser(description='Draw samples of a dataset with their labels.')
    parser.add_argument('config', help='path of the config file')
    parser.add_argument(
        '--split',
        choices=['train', 'val', 'test'],
        default='train',
        help='loader whose dataset is drawn (default: train)',
    )
    parser.add_argument(
        '--output-dir',
        help='folder of the pictures (default: browse in the '
        "config's work_dir, else work_dirs/<config name>/browse)",
    )
    parser.add_argument(
        '--show-number',
        type=int,
        default=12,
        metavar='N',
        help='number of samples, spread over the dataset (default: 12)',
    )
    parser.add_argument(
        '--bands',
        type=int,
        nargs=3,
        metavar=('R', 'G', 'B'),
        help='channels of the image to show as red, green and blue, counted from 1 '
        '(default: bands=dict(rgb=...) of the backbone, else the first three)',
    )
    parser.add_argument(
        '--each', action='store_true', help='write a file for each sample, instead of one sheet'
    )
    parser.add_argument(
        '--not-show', action='store_true', help="MMSegmentation's option; windows are never opened"
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=ConfigOptions,
        metavar='KEY=VALUE',
        help='overrides of settings of the config',
    )
    parser.set_defaults(launcher='none', local_rank=None, accelerator=None, work_dir=None)
    args = parser.parse_args(argv)
    from mapsage.commands import cli
    from mapsage.commands.browse_dataset import browse

    for path in browse(
        cli.load_config(args), args.split, args.output_dir, args.show_number, args.bands, args.each
    ):
        print(path)


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
