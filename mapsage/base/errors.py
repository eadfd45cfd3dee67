"""The base class of errors that a user can act upon, for the rooms of MapSage.

A command prints the message of a `UserError` as one sentence, and any other exception with its
traceback (`mapsage/commands/cli.py`). The class is defined in the launcher's package, which raises
it too and must not import `mapsage`.
"""

from mapsage_launcher.errors import UserError

__all__ = ['UserError']
