"""What tools/report.py and tools/compare.py do: write reports of runs that have ended."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Callable

from mapsage.report import REPORT, ReportError, compare_runs, write_report


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
        found = compare_runs(args.runs, args.out)
    except (OSError, ReportError) as error:
        print(f'{type(error).__name__}: {error}', file=sys.stderr)  # noqa: T201
        return 1
    print(f'{found.table}\n\n{found.page}')  # noqa: T201
    return 0


def refresh_report(work_dir: Path, say: Callable[[str], None]) -> None:
    """Write the report of a run again, where its folder has one, since there is a new map in it."""
    if not (work_dir / REPORT).is_file():
        return
    try:
        write_report(work_dir)
    except (OSError, ReportError) as error:  # the maps are there, and nothing else is asked for
        say(f'note: {work_dir / REPORT} does not show them: {error}')
