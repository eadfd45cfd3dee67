"""Choose the windows to label next, or those whose labels a sure model contradicts.

    python tools/suggest_labels.py CONFIG CHECKPOINT scenes/ --count 50 --out next_tiles.gpkg
    python tools/suggest_labels.py CONFIG CHECKPOINT scenes/ --suspicious --out check.gpkg
"""
from __future__ import annotations

from typing import Optional, Sequence

from mapsage.commands import cli, suggest_labels


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = suggest_labels.build_parser(__doc__)
    args = parser.parse_args(argv)
    suggest_labels.check_arguments(parser, args)
    return suggest_labels.suggest(args)


def run() -> None:
    """Run the command line and exit."""
    cli.run(main)
