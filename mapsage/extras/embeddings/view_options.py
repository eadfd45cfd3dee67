"""What the extra adds to tools/view.py: labels by clicks on embeddings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .labeling import ClickedMap


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the option of labels to a parser."""
    parser.add_argument(
        '--points',
        metavar='FILE.gpkg',
        help='show embeddings of mapsage embed in place of maps, and a map of them that follows '
        'your clicks; the clicks are points in this file',
    )


def is_asked(args: argparse.Namespace) -> bool:
    """Return whether a command line names embeddings to label."""
    return args.points is not None


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program with the parser's error if options contradict each other."""
    if not is_asked(args):
        return
    if Path(args.points).suffix.lower() != '.gpkg':
        parser.error(f'--points {args.points}: expected a name that ends in .gpkg')
    for option in ('scenes', 'truth', 'review', 'static', 'bands'):
        if getattr(args, option) is not None:
            parser.error(f'--{option} is of maps, and --points shows embeddings: leave one out')


def run(args: argparse.Namespace) -> ClickedMap:
    """Open the embeddings, as the viewer labels them in the file of ``--points``."""
    from mapsage.maps.inputs import find_inputs

    from .labeling import ClickedMap

    return ClickedMap(list(find_inputs(args.maps, args.allow_remote).values()))
