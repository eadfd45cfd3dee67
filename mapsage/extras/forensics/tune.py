"""Measure which options make a config's training step faster on this machine.

python tools/tune.py CONFIG [--compile]

Within two minutes, with the config's model, batch and data: bfloat16, channels last, a fused
optimizer, other numbers of threads or loader workers. The last line is the command to use. The
measurement is in `tuning/`.
"""

from __future__ import annotations

from typing import Optional, Sequence

from mapsage.commands import options


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = options.build_parser("Measure which options make a config's step faster.", doc=__doc__)
    parser.add_argument(
        '--compile',
        action='store_true',
        help='also measure whether a compiled model is faster; the compiler takes minutes more',
    )
    args = parser.parse_args(argv)
    from mapsage.extras.forensics.tuning.command import tune

    return tune(args)


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
