"""Options of tools/doctor.py that have become commands; they work until version 0.7.

Remove this file, and its row in ``extra.json``, with that version.
"""

from __future__ import annotations

import argparse
import sys

from mapsage.extras.forensics.list_operators import add_crop_size, report

_COMMANDS = {
    '--operators': 'operators CONFIG',
    '--compare': 'operators CONFIG --compare',
    '--tune': 'tune CONFIG',
    '--tune-compile': 'tune CONFIG --compile',
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    for option, command in _COMMANDS.items():
        parser.add_argument(option, action='store_true', help=f'old form of mapsage {command}')
    add_crop_size(parser)


def is_asked(args: argparse.Namespace) -> bool:
    """Return whether a command line wants one of them."""
    return args.tune or args.tune_compile or args.compare or args.operators


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program with the parser's error if an option has no config."""
    if is_asked(args) and not args.config:
        parser.error(f'{_option(args)} needs a config: mapsage {_COMMANDS[_option(args)]}')


def run(args: argparse.Namespace) -> int:
    """Carry out what the command line wants, and return the exit status."""
    option = _option(args)
    print(  # noqa: T201
        f'DeprecationWarning: doctor {option} is now `mapsage {_COMMANDS[option]}`; the option works '
        f'until version 0.7',
        file=sys.stderr,
    )
    if not option.startswith('--tune'):
        return report(args)
    from .tuning.command import tune

    args.compile = args.tune_compile
    return tune(args)


def _option(args: argparse.Namespace) -> str:
    """Return the option that is carried out: the first of tuning, comparison and operators."""
    if args.tune_compile:
        return '--tune-compile'
    return '--tune' if args.tune else '--compare' if args.compare else '--operators'
