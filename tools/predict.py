"""Predict maps of images and scenes of any size: on one device, or as one rank of a launcher.

    python tools/predict.py CONFIG CHECKPOINT INPUT... --out DIR [--confidence] [--polygons]
    bash scripts/predict.sh CONFIG CHECKPOINT INPUT... --out DIR      all cards of this machine
    python tools/predict.py --model MODEL.onnx INPUT... --out DIR     without PyTorch
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mapsage.commands import predict  # noqa: E402


def main(argv=None) -> int:
    return predict.main(argv, __doc__)


if __name__ == '__main__':
    predict.run(main)
