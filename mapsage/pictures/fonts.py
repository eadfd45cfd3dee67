"""Fonts for text that Matplotlib's own font lacks, such as Chinese names of classes and scenes."""

from __future__ import annotations

import functools
import os
from typing import List

# Parts of the file names of usual fonts with Chinese characters, the preferred ones first.
_CHINESE = (
    'notosanscjk',
    'sourcehansans',
    'wqy',
    'msyh',
    'simhei',
    'pingfang',
    'droidsansfallback',
    'notoserifcjk',
    'simsun',
)


@functools.lru_cache(maxsize=1)
def chinese_families() -> List[str]:
    """Return the family of an installed font with Chinese characters; empty if there is none."""
    from matplotlib import font_manager

    paths = font_manager.findSystemFonts()
    for part in _CHINESE:
        for path in sorted(paths):
            name = os.path.basename(path).lower()
            if part in name and 'bold' not in name:
                # Matplotlib's list of fonts may be older than the font.
                font_manager.fontManager.addfont(path)
                return [font_manager.fontManager.ttflist[-1].name]
    return []
