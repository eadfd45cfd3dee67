"""Start the ranks of a training with torchrun; if ranks fail, print the cause last.

    python tools/launch.py [options of torchrun] tools/train.py CONFIG [options of tools/train.py]
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mapsage_launcher.launch import main  # noqa: E402

if __name__ == '__main__':
    main()
