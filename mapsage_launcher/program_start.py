"""Imports the module of a program; of a program that is asked for its help, only the parser.

Importing `mapsage` imports PyTorch and MMSegmentation, which takes seconds and which a help text
does not need. Modules of programs import neither before they have parsed their command line.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import Callable, Sequence

from mapsage_launcher.drivers import no_plugins_loaded
from mapsage_launcher.only_help import only_help


def import_program(module: str) -> Callable[[], object]:
    """Import the module of a program.

    Args:
        module: Name of a module with a function ``run()``, and of `mapsage` with ``main()`` too.

    Returns:
        Function that runs the program with the command line of this process.
    """
    if module.startswith('mapsage.') and asks_for_help(sys.argv[1:]):
        return partial(_print_help, module)
    with no_plugins_loaded():
        return importlib.import_module(module).run


def _print_help(module: str) -> None:
    """Let the parser of a program print the help and exit."""
    # The parser may import extras that add options to the program.
    with only_help():
        importlib.import_module(module).main()


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return whether a command line has ``-h`` or ``--help`` among its options."""
    options = arguments[: list(arguments).index('--')] if '--' in arguments else arguments
    return '-h' in options or '--help' in options
