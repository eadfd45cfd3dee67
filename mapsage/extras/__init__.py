"""Capabilities that can be deleted, a folder each; the core imports none of them.

A folder holds the code of one capability, its programs and what it registers with MMEngine. Its
``extra.json`` tells the core what is there (`mapsage_launcher/extras.py`). An extra imports the
core, and another extra only where the import contract in pyproject.toml says so.
"""

import importlib

from mapsage_launcher.extras import list_extras


def register_extras() -> None:
    """Import the modules of all extras that register classes."""
    for extra in list_extras().values():
        for module in extra.registers:
            importlib.import_module(module)
