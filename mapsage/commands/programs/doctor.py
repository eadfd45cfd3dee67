"""Tell whether a training would start here, and the reasons. Exit status 0 if it would.

    python tools/doctor.py [CONFIG] [--accelerator NAME]    one process
    bash scripts/doctor.sh [CONFIG]                         all cards, and how they communicate
    python tools/doctor.py CONFIG --operators               what a card leaves to the CPU
    python tools/doctor.py CONFIG --compare                 which kernels of a card are wrong
    python tools/doctor.py CONFIG --tune                    which options make its step faster here
"""
from __future__ import annotations

import argparse
from typing import Optional, Sequence

from mapsage.commands import options


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = options.build_parser('Say whether a training would start here.', False, __doc__)
    parser.add_argument('--operators', action='store_true',
                        help='list the operators of a step of the config and where the card, or '
                        "else Enflame's S60, computes them; needs neither card nor data")
    parser.add_argument('--crop-size', type=_pixels, metavar='N',
                        help="height and width of the images of that step in pixels (default: the "
                        "config's)")
    parser.add_argument('--compare', action='store_true',
                        help='compute that step on the card and name each operator whose result '
                        "differs from the CPU's by more than rounding; exit status 1 if one does")
    parser.add_argument('--tune', action='store_true',
                        help='measure within two minutes, with the model, the batch and the data '
                        'of the config, whether bfloat16, channels last, a fused optimizer, other '
                        'numbers of threads or loader workers are faster here, and print the '
                        'command to use')
    parser.add_argument('--tune-compile', action='store_true',
                        help='--tune, and whether a compiled model is faster; the compiler takes '
                        'minutes more')
    args = parser.parse_args(argv)
    if args.tune or args.tune_compile:
        from mapsage.commands.doctor.tuning.command import tune
        return tune(args)
    if args.compare:
        from mapsage.commands.doctor.kernels import compare_kernels
        return compare_kernels(args)
    if args.operators:
        from mapsage.commands.doctor.operators import report_operators
        return report_operators(args)
    from mapsage.commands.doctor.diagnosis import diagnose
    return diagnose(args)


def _pixels(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f'expected a number of pixels from 1, got {text!r}')
    return int(text)


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli
    cli.run(main)
