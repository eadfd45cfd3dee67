"""What the extra adds to tools/doctor.py: `--operators`, `--compare` and `--tune`."""

from __future__ import annotations

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.add_argument(
        '--operators',
        action='store_true',
        help='list the operators of a step of the config and where the card, or '
        "else Enflame's S60, computes them; needs neither card nor data",
    )
    parser.add_argument(
        '--crop-size',
        type=_pixels,
        metavar='N',
        help="height and width of the images of that step in pixels (default: the config's)",
    )
    parser.add_argument(
        '--compare',
        action='store_true',
        help='compute that step on the card and name each operator whose result '
        "differs from the CPU's by more than rounding; exit status 1 if one does",
    )
    parser.add_argument(
        '--tune',
        action='store_true',
        help='measure within two minutes, with the model, the batch and the data '
        'of the config, whether bfloat16, channels last, a fused optimizer, other '
        'numbers of threads or loader workers are faster here, and print the '
        'command to use',
    )
    parser.add_argument(
        '--tune-compile',
        action='store_true',
        help='--tune, and whether a compiled model is faster; the compiler takes minutes more',
    )


def is_asked(args: argparse.Namespace) -> bool:
    """Return whether a command line wants one of them."""
    return args.tune or args.tune_compile or args.compare or args.operators


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Accept every combination: the first of tuning, comparison and operators is carried out."""


def run(args: argparse.Namespace) -> int:
    """Carry out what the command line wants, and return the exit status."""
    if args.tune or args.tune_compile:
        from .tuning.command import tune

        return tune(args)
    if args.compare:
        from .kernels import compare_kernels

        return compare_kernels(args)
    from .operator_report import report_operators

    return report_operators(args)


def _pixels(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f'expected a number of pixels from 1, got {text!r}')
    return int(text)
