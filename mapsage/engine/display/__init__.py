"""Hooks that show a run: pictures, progress, the report, comparisons. Nothing depends on them.

Importing the package registers them; `engine/runner.py` has those that every run gets.
"""

from .before_after_hook import BeforeAfterHook, NoValidationError
from .preview_hook import PreviewHook
from .progress_hook import ProgressBarHook
from .run_report_hook import RunReportHook
from .window_visualization_hook import WindowVisualizationHook

__all__ = [
    'BeforeAfterHook',
    'NoValidationError',
    'PreviewHook',
    'ProgressBarHook',
    'RunReportHook',
    'WindowVisualizationHook',
]
