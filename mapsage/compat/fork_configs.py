"""Find the configs that ``_base_ = ['mmseg::...']`` names in the fork of MMSegmentation.

Gap: onedl-mmengine 0.10.12 looks for the distribution ``mmsegmentation``, and its own fork of that
is named ``onedl-mmsegmentation``. A config that inherits from ``mmseg::`` ended with
"mmsegmentation is not installed".
Remove when: onedl-mmengine finds the configs of onedl-mmsegmentation.
"""

from __future__ import annotations

from mmengine.config.utils import MODULE2PACKAGE
from mmengine.utils import is_installed

_FORK = 'onedl-mmsegmentation'


def apply() -> None:
    """Name the fork if it is installed and MMSegmentation's own distribution is not."""
    if not is_installed(MODULE2PACKAGE['mmseg']) and is_installed(_FORK):
        MODULE2PACKAGE['mmseg'] = _FORK
