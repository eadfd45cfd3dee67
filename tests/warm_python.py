"""A Python that has its imports behind it: what tests start as `python tools/...` forks from it.

One fork server (mapsage_launcher/ranks/fork_server.py) serves a test session, as one
serves a user's launch.
"""

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:  # in a rank of a test that was not forked
    sys.path.append(ROOT)

from mapsage_launcher.ranks import rank_start  # noqa: E402

# What the entry points of tools/ import beyond what a rank needs, and quick_host.py of this folder.
MORE_IMPORTS = (
    'torch.distributed.run',
    'mapsage.commands.predict',
    'mapsage.commands.checkpoint_model',
    'quick_host',
)
_PROGRAM = 'MAPSAGE_TEST_WARM_PYTHON'


def warm_python() -> str:
    """Return the path of a program that stands for `python`, starting the server at first."""
    if _PROGRAM not in os.environ:
        before = os.environ.get('PYTHONPATH')
        os.environ['PYTHONPATH'] = str(Path(__file__).parent)  # of the server, not of its forks
        try:
            server = rank_start.ForkServer([*rank_start.RANK_IMPORTS, *MORE_IMPORTS])
        finally:
            del os.environ['PYTHONPATH']
            if before is not None:
                os.environ['PYTHONPATH'] = before
        atexit.register(server.stop)
        program = Path(tempfile.mkdtemp(prefix='mapsage-warm-')) / 'python'
        atexit.register(shutil.rmtree, str(program.parent), ignore_errors=True)
        command = ' '.join(
            f'"{word}"' for word in rank_start.caller_command(server.address, '$PPID')
        )
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        program.chmod(0o755)
        os.environ.update({_PROGRAM: str(program), rank_start.ADDRESS: server.address})
    return os.environ[_PROGRAM]
