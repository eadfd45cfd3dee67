"""Reports of runs as self-contained HTML files, made from the files in a work dir.

`write_report` makes the page of one run, `compare_runs` a page of several. Nothing in this room
imports PyTorch or the MM packages, so reports can be written on a machine without them.
"""

from .comparison import compare_runs
from .page import REPORT, write_report
from .record import ReportError

__all__ = ['REPORT', 'ReportError', 'compare_runs', 'write_report']
