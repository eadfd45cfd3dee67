"""Reports of runs as HTML files that need no other file, from what the runs left in their folders.

Nothing here imports PyTorch or the MM packages.
"""
from .comparison import compare_runs
from .page import REPORT, write_report
from .record import ReportError

__all__ = ['REPORT', 'ReportError', 'compare_runs', 'write_report']
