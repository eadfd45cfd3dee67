"""tools/report.py and tools/compare.py: write reports of finished runs.

The reports are made by `mapsage/pictures/report/`, which needs neither PyTorch nor the MM packages.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Callable

from mapsage.pictures.report import REPORT, ReportError, compare_runs, write_report


def report(args: argparse.Namespace) -> int:
    """Write the report of a run and print its path; return the exit status."""
    try:
        print(write_report(args.run, args.out))  # noqa: T201
    except (OSError, ReportError) as error:
        print(f'{type(error).__name__}: {error}', file=sys.stderr)  # noqa: T201
        return 1
    return 0


def compare(args: argparse.Namespace) -> int:
    """Print a table of several runs and write a page of them; return the exit status."""
    try:
        comparison = compare_runs(args.runs, args.out)
    except (OSError, ReportError) as error:
        print(f'{type(error).__name__}: {error}', file=sys.stderr)  # noqa: T201
        return 1
    print(f'{comparison.table}\n\n{comparison.page}')  # noqa: T201
    return 0


def refresh_report(work_dir: Path, say: Callable[[str], None]) -> None:
    """Update the report in a run's work dir, if there is one, after new maps were written."""
    if not (work_dir / REPORT).is_file():
        return
    try:
        write_report(work_dir)
    # Only a note, because the maps that the user wants are complete.
    except (OSError, ReportError) as error:
        say(f'note: {work_dir / REPORT} does not show them: {error}')
