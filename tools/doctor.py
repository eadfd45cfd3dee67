"""Say whether a training would start here, and why or why not. Exit status 0 when it would.

    python tools/doctor.py [CONFIG] [--accelerator NAME]    one process
    bash scripts/doctor.sh [CONFIG]                         all cards, and how they communicate
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    from mapsage.commands import cli, doctor
except ModuleNotFoundError as error:
    sys.exit(f'problem: {error.name} is not installed in {sys.executable}. Use the Python that '
             f'`bash scripts/setup_env.sh` prints, or install requirements.txt into this one.')


def main(argv=None) -> int:
    parser = cli.build_parser('Say whether a training would start here.', False, __doc__)
    return doctor.diagnose(parser.parse_args(argv))


if __name__ == '__main__':
    cli.run(main)
