"""Keep the rendezvous store of elastic jobs: the place where their machines meet.

    python tools/rendezvous.py [--port 29400]
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mapsage_launcher.rendezvous import main  # noqa: E402

if __name__ == '__main__':
    main()
