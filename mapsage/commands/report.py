"""Write the report of a run as one HTML file: curves, scores by class, pictures, devices.

python tools/report.py WORK_DIR                  its last run, into WORK_DIR/report.html
python tools/report.py WORK_DIR/20261123_141116  an earlier run of the same folder
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Callable, Optional, Sequence

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
    from mapsage.pictures.report import ReportError, write_report

    try:
        print(write_report(args.run, args.out))
    except (OSError, ReportError) as error:
        print(f'{type(error).__name__}: {error}', file=sys.stderr)
        return 1
    return 0


def refresh_report(work_dir: Path, say: Callable[[str], None]) -> None:
    """Update the report in a run's work dir, if there is one, after new maps were written."""
    from mapsage.pictures.report import REPORT, ReportError, write_report

    if not (work_dir / REPORT).is_file():
        return
    try:
        write_report(work_dir)
    # Only a note, because the maps that the user wants are complete.
    except (OSError, ReportError) as error:
        say(f'note: {work_dir / REPORT} does not show them: {error}')


def run() -> None:
    """Run the command line and exit."""
    sys.exit(main())
