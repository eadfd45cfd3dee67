"""The number of ranks that the launcher starts on this machine by default: one per card.

Cards are counted in another process (tools/count_cards.py), because a process that has used a
driver cannot fork ranks that use it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from mapsage_launcher.errors import UserError

# Value of ``--nproc_per_node`` that leaves the number to this file.
CARDS = 'cards'
# Ranks on a machine without a card: a rehearsal for a machine with eight.
WITHOUT_CARDS = 8


class RankCountError(UserError, ValueError):
    """The cards cannot be counted. The counting process has already printed the reason."""


class RankCount:
    """Counts the cards while the launcher does its imports.

    Args:
        arguments: Command line arguments of the launcher.
        program: Path of tools/count_cards.py.
        driver: Kind of device that ranks may use on this machine (``possible_driver``). None if
            that is only the CPU; then nothing is counted.
    """

    def __init__(self, arguments: Sequence[str], program: Path, driver: Optional[str]) -> None:
        options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        options.add_argument('--nproc_per_node', '--nproc-per-node')
        self._counts = options.parse_known_args(arguments)[0].nproc_per_node == CARDS
        self._process: Optional[subprocess.Popen] = None
        if self._counts and driver is not None:
            self._process = subprocess.Popen(
                [sys.executable, str(program), *_program_arguments(arguments)],
                stdout=subprocess.PIPE,
                universal_newlines=True,
            )

    def apply(self, args: argparse.Namespace) -> str:
        """Put the number into torchrun's parsed arguments; return a line for the log, or ''.

        Raises:
            RankCountError: If the cards cannot be counted, for example because the accelerator of
                the command line is missing on this machine.
        """
        if not self._counts:
            return ''
        counted = self._wait() if self._process is not None else {'cards': 0}
        ranks = counted['cards'] or WITHOUT_CARDS
        args.nproc_per_node = str(ranks)
        if not counted['cards']:
            return f'{ranks} ranks, since no card is used (NPROC_PER_NODE sets another number)'
        plural = 's, one for each' if ranks > 1 else ', for the only'
        return (
            f'{ranks} rank{plural} {counted["accelerator"]} device that is visible '
            f'(NPROC_PER_NODE sets another number)'
        )

    def _wait(self) -> Dict[str, Any]:
        assert self._process is not None
        output = self._process.communicate()[0]
        if self._process.returncode != 0:
            raise RankCountError('the cards of this machine cannot be counted; the reason is above')
        try:
            return json.loads(output.splitlines()[-1])
        except (ValueError, IndexError):
            raise RankCountError(
                f'the cards of this machine cannot be counted: expected a line of '
                f'JSON, got {output[-200:]!r}. Set NPROC_PER_NODE.'
            ) from None


def _program_arguments(arguments: Sequence[str]) -> List[str]:
    """Return the arguments of the program, which is the first argument that names a Python file.

    Requests for help are left out, because the program itself answers them.
    """
    for position, argument in enumerate(arguments):
        if argument.endswith('.py') and not argument.startswith('-'):
            return [
                option for option in arguments[position + 1 :] if option not in ('-h', '--help')
            ]
    return []
