"""The error of an assessment that cannot be made; commands print it without a traceback."""

from mapsage.base.errors import UserError


class AssessError(UserError, ValueError):
    """A plan, its points or its map cannot be used; the message has the next step."""
