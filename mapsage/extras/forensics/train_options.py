"""What the extra adds to tools/train.py: one iteration is repeated."""

from __future__ import annotations

import argparse
from typing import Any


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the option to a parser."""
    parser.add_argument(
        '--replay',
        type=int,
        metavar='ITER',
        help='repeat iteration ITER from the last checkpoint of the work dir '
        'before it, and write its batches, losses and gradient norms, one file for '
        'each virtual rank, into WORK_DIR/replay/iter_ITER; nothing else '
        'changes',
    )


def is_asked(args: argparse.Namespace) -> bool:
    """Return whether a command line wants a replay."""
    return args.replay is not None


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program with the parser's error if options contradict each other."""
    if is_asked(args) and args.resume:
        parser.error('--replay starts from a checkpoint that it chooses itself: leave --resume out')


def run(args: argparse.Namespace, cfg: Any) -> bool:
    """Repeat the iteration of a config's run, in place of a training."""
    from .replay import replay

    replay(cfg, args.replay)
    return True
