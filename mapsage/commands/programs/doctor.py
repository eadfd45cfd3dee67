"""Tell whether a training would start here, and the reasons. Exit status 0 if it would.

    python tools/doctor.py [CONFIG] [--accelerator NAME]    one process
    bash scripts/doctor.sh [CONFIG]                         all cards, and how they communicate
"""
from __future__ import annotations

from typing import Optional, Sequence

from mapsage.commands import cli
from mapsage.commands.doctor.diagnosis import diagnose


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = cli.build_parser('Say whether a training would start here.', False, __doc__)
    return diagnose(parser.parse_args(argv))


def run() -> None:
    """Run the command line and exit."""
    cli.run(main)
