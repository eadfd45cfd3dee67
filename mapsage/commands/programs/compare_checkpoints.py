"""Compare the weights of two checkpoints of one model.

    python tools/compare_checkpoints.py A.pth B.pth [--tolerance 0.01]

Prints the number of tensors that are equal bit for bit, and the largest difference relative to the
size (root mean square) of its tensor. The exit status is 0 if this difference is at most the
tolerance; by default all bits must be equal.
"""

from __future__ import annotations

import argparse
from typing import Optional, Sequence


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('first', help='checkpoint of a run (.pth)')
    parser.add_argument('second', help='checkpoint to compare it with')
    parser.add_argument(
        '--tolerance',
        type=float,
        default=0.0,
        help='largest relative difference that is accepted (default: 0, all bits)',
    )
    args = parser.parse_args(argv)

    from mapsage.commands.compare_checkpoints import compare_checkpoints

    comparison = compare_checkpoints(args.first, args.second)
    print(comparison)
    if args.tolerance:
        return 0 if comparison.largest <= args.tolerance else 1
    return 0 if comparison.equal == comparison.total else 1


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
