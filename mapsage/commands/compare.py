"""Compare runs: a table of scores, time and classes, and one HTML page with curves and settings.

python tools/compare.py work_dirs/one work_dirs/other work_dirs/third
python tools/compare.py work_dirs/one/20261122_090000 work_dirs/one    two runs of one folder
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
        'runs',
        nargs='+',
        metavar='RUN',
        help='work dir of a training, for its '
        'last run; or the folder of one start in it, WORK_DIR/TIMESTAMP',
    )
    parser.add_argument(
        '--out',
        metavar='FILE.html',
        default='compare.html',
        help='file to write (default: compare.html in the current folder)',
    )
    args = parser.parse_args(argv)
    from mapsage.pictures.report import ReportError, compare_runs

    try:
        comparison = compare_runs(args.runs, args.out)
    except (OSError, ReportError) as error:
        print(f'{type(error).__name__}: {error}', file=sys.stderr)
        return 1
    print(f'{comparison.table}\n\n{comparison.page}')
    return 0


def run() -> None:
    """Run the command line and exit."""
    sys.exit(main())
