"""Choose the windows to label next, or those whose labels a sure model contradicts.

    python tools/suggest_labels.py CONFIG CHECKPOINT scenes/ --count 50 --out next_tiles.gpkg
    python tools/suggest_labels.py CONFIG CHECKPOINT scenes/ --suspicious --out check.gpkg
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mapsage.commands import cli, suggest_labels  # noqa: E402


def main(argv=None) -> int:
    parser = suggest_labels.build_parser(__doc__)
    args = parser.parse_args(argv)
    suggest_labels.check_arguments(parser, args)
    return suggest_labels.suggest(args)


if __name__ == '__main__':
    cli.run(main)
