"""Format the text of a config once instead of at every checkpoint.

Gap: mmengine 0.10.7 and onedl-mmengine 0.10.12 run yapf over the whole config each time its text is
requested: at the start on every rank, for each visualizer, and at each checkpoint on every rank.
This takes a third of a second or more for a config of 100 lines.
Remove when: ``Config.pretty_text`` of every supported mmengine caches its text.
"""
from __future__ import annotations

from typing import Any, Dict

from mmengine.config import Config

_format = Config.pretty_text.fget
_formatted: Dict[str, str] = {}  # only the last one, because a run has one config


def _pretty_text(config: Any) -> str:
    """Return the formatted Python text of a config."""
    asked = repr((config.to_dict(), getattr(config, '_format_python_code', True)))
    if asked not in _formatted:
        text = _format(config)
        _formatted.clear()
        _formatted[asked] = text
    return _formatted[asked]


def apply() -> None:
    """Replace mmengine's property by one with a cache."""
    Config.pretty_text = property(_pretty_text)
