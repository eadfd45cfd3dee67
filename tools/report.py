"""Write the report of a run again, as one HTML file: curves, scores by class, pictures, devices.

    python tools/report.py WORK_DIR                  its last run, into WORK_DIR/report.html
    python tools/report.py WORK_DIR/20261123_141116  an earlier run of the same folder
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mapsage.commands.report import report  # noqa: E402
from mapsage.console import accept_any_text, examples  # noqa: E402


def main(argv=None) -> int:
    accept_any_text()
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], **examples(__doc__))
    parser.add_argument('run', help='work dir of a training or test, for its last run; or the '
                        'folder of one start in it, WORK_DIR/TIMESTAMP')
    parser.add_argument('--out', metavar='FILE.html',
                        help='file to write (default: report.html in that folder)')
    return report(parser.parse_args(argv))


if __name__ == '__main__':
    sys.exit(main())
