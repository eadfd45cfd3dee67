"""Docstrings for mkdocstrings: Sphinx roles such as ``:class:`Name``` become code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r':(?:class|func|meth|attr|data|mod|exc):`~?([^`]+)`')


class PlainRoles(griffe.Extension):
    """Replaces ``:class:`Name``` by ```Name```, since Markdown has no roles."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        """Change the docstring of an object that griffe has read."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r'`\1`', obj.docstring.value)
