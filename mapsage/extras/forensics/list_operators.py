"""List the operators of a step of a config, and where a card or Enflame's S60 computes them.

python tools/list_operators.py CONFIG [--crop-size N]   needs neither card nor data
python tools/list_operators.py CONFIG --compare         which of them are wrong on the card

The report is in `operator_report.py`, the comparison in `kernels.py`.
"""

from __future__ import annotations

import argparse
from typing import Optional, Sequence

from mapsage.commands import options


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = options.build_parser(
        "List a step's operators and where they are computed.", doc=__doc__
    )
    add_crop_size(parser)
    parser.add_argument(
        '--compare',
        action='store_true',
        help='compute that step on the card and name each operator whose result '
        "differs from the CPU's by more than rounding; exit status 1 if one does",
    )
    return report(parser.parse_args(argv))


def add_crop_size(parser: argparse.ArgumentParser) -> None:
    """Add ``--crop-size`` to a parser."""
    parser.add_argument(
        '--crop-size',
        type=_pixels,
        metavar='N',
        help="height and width of the images of that step in pixels (default: the config's)",
    )


def report(args: argparse.Namespace) -> int:
    """List the operators of a step, or with ``compare`` the wrong ones; return the exit status."""
    if args.compare:
        from mapsage.extras.forensics.kernels import compare_kernels

        return compare_kernels(args)
    from mapsage.extras.forensics.operator_report import report_operators

    return report_operators(args)


def _pixels(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f'expected a number of pixels from 1, got {text!r}')
    return int(text)


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
