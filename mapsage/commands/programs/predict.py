"""Predict maps of images and scenes of any size: on one device, or as one rank of a launcher.

    python tools/predict.py CONFIG CHECKPOINT INPUT... --out DIR [--confidence] [--polygons]
    bash scripts/predict.sh CONFIG CHECKPOINT INPUT... --out DIR      all cards of this machine
    python tools/predict.py --model MODEL.onnx INPUT... --out DIR     without PyTorch
"""
from __future__ import annotations

from typing import Optional, Sequence

from mapsage.commands import predict


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    return predict.main(argv, __doc__)


def run() -> None:
    """Run the command line and exit."""
    predict.run(main)
