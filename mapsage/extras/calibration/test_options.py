"""What the extra adds to tools/test.py: the calibration error is measured and drawn."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the option to a parser."""
    parser.add_argument(
        '--calibration',
        action='store_true',
        help='also compare probabilities with shares of correct pixels: ECE, a '
        'table by class, and reliability.png in the work dir',
    )


def is_asked(args: argparse.Namespace) -> bool:
    """Return whether a command line wants the calibration error."""
    return bool(args.calibration)


def run(args: argparse.Namespace, cfg: Any) -> None:
    """Add ``CalibrationError`` to the metrics of the test, with its picture in the work dir."""
    evaluators = cfg.get('test_evaluator') or []
    evaluators = list(evaluators) if isinstance(evaluators, (list, tuple)) else [evaluators]
    calibration = next(
        (evaluator for evaluator in evaluators if evaluator.get('type') == 'CalibrationError'), None
    )
    if calibration is None:
        calibration = dict(type='CalibrationError')
        evaluators.append(calibration)
    calibration.setdefault('picture', str(Path(cfg.work_dir) / 'reliability.png'))
    cfg.test_evaluator = evaluators
