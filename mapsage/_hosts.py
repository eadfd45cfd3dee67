"""Whether the packages that training needs are there."""
from __future__ import annotations

import importlib.util
from typing import List

# Each is looked for and none imported: one that is there and broken is to raise its own error.
_HOSTS = ('torch', 'mmengine', 'mmcv', 'mmseg')


def absent_hosts() -> List[str]:
    """Return the names of the host packages that are not installed."""
    return [name for name in _HOSTS if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a finder that refuses it; a stand-in without a spec
        return False
