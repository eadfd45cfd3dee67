"""Starts the programs of this folder; their code is in mapsage and mapsage_launcher."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(module: str) -> None:
    """Import a module of the source tree, or of the installed wheel, and run it."""
    if (ROOT / 'mapsage').is_dir():  # in a wheel this folder is mapsage/.mim/tools
        sys.path.insert(0, str(ROOT))
    try:
        from mapsage_launcher.program_start import import_program

        program = import_program(module)
    except ModuleNotFoundError as error:
        if (error.name or '').startswith(('mapsage.extras.', 'mapsage_launcher.nodes')):
            sys.exit(
                f'problem: this program is in {error.name.replace(".", "/")}, which is not '
                f'installed here. Install the whole package of mapsage.'
            )
        if (error.name or 'mapsage').startswith('mapsage'):
            raise
        sys.exit(
            f'problem: {error.name} is not installed in {sys.executable}. Use the Python that '
            f'`bash scripts/setup_env.sh` prints, or install requirements.txt into this one.'
        )
    program()
