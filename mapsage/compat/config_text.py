"""Format a config's text once, not at every checkpoint.

Gap: mmengine 0.10.7 and onedl-mmengine 0.10.12 run yapf over the whole config each time its text is
asked for: at the start on every rank, for each visualizer, and at each checkpoint on every rank; a
third of a second and more for a config of 100 lines.
Remove when: ``Config.pretty_text`` of every supported mmengine remembers its text.
"""
from __future__ import annotations

from typing import Any, Dict

from mmengine.config import Config

_format = Config.pretty_text.fget
_formatted: Dict[str, str] = {}  # the last one only: a run has one config


def _pretty_text(config: Any) -> str:
    """Get formatted python config text."""
    asked = repr((config.to_dict(), getattr(config, '_format_python_code', True)))
    if asked not in _formatted:
        text = _format(config)
        _formatted.clear()
        _formatted[asked] = text
    return _formatted[asked]


def apply() -> None:
    """Put the memory before mmengine's property."""
    Config.pretty_text = property(_pretty_text)
