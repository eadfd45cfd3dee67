"""Write the report of a run as one HTML file: curves, scores by class, pictures, devices.

python tools/report.py WORK_DIR                  its last run, into WORK_DIR/report.html
python tools/report.py WORK_DIR/20261123_141116  an earlier run of the same folder
"""

from __future__ import annotations

import argparse
import sys
from typing import Optional, Sequence

from mapsage.base.console import accept_any_text, examples


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    accept_any_text()
    parser = argparse.ArgumentParser(
        description=(__doc__ or '').splitlines()[0], **examples(__doc__)
    )
    parser.add_argument(
        'run',
        help='work dir of a training or test, for its last run; or the '
        'folder of one start in it, WORK_DIR/TIMESTAMP',
    )
    parser.add_argument(
        '--out', metavar='FILE.html', help='file to write (default: report.html in that folder)'
    )
    args = parser.parse_args(argv)
    from mapsage.commands.report import report

    return report(args)


def run() -> None:
    """Run the command line and exit."""
    sys.exit(main())
