"""What the extra adds to tools/train.py: ranks that only encode."""

from __future__ import annotations

import argparse
from typing import Any


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the option to a parser."""
    parser.add_argument(
        '--encoders',
        type=int,
        metavar='N',
        help='number of ranks that only compute the features of the frozen '
        "backbone (feature_source of type 'Streamed')",
    )


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program with the parser's error if options contradict each other."""


def is_asked(args: argparse.Namespace) -> bool:
    """Return whether a command line sets the number of encoders."""
    return args.encoders is not None


def run(args: argparse.Namespace, cfg: Any) -> bool:
    """Set ``feature_source`` to ``'Streamed'`` with this number of ranks; 0 removes it."""
    source = dict(cfg.get('feature_source') or {})
    streamed = source.get('type', 'Streamed') == 'Streamed'
    if args.encoders:
        settings = source if streamed else {}
        cfg.feature_source = dict(settings, type='Streamed', encoders=args.encoders)
    elif source and streamed:
        cfg.pop('feature_source')
    return False
