"""Format the text of a config once instead of at every checkpoint.

Gap: mmengine 0.10.7 and onedl-mmengine 0.10.12 run yapf over the whole config each time its text is
requested: at the start on every rank, for each visualizer, and at each checkpoint on every rank.
This takes a third of a second or more for a config of 100 lines.
Remove when: ``Config.pretty_text`` of every supported mmengine caches its text.
"""

from __future__ import annotations

from typing import Dict

from mmengine.config import Config

_format = Config.pretty_text.fget
# Content -> text of the last config only, because a run has one config.
_cache: Dict[str, str] = {}


def _pretty_text(config: Config) -> str:
    """Return the formatted Python text of a config."""
    content = repr((config.to_dict(), getattr(config, '_format_python_code', True)))
    if content not in _cache:
        text = _format(config)
        _cache.clear()
        _cache[content] = text
    return _cache[content]


def apply() -> None:
    """Replace mmengine's property with one that has a cache."""
    Config.pretty_text = property(_pretty_text)
