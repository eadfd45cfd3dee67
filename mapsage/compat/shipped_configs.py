"""Find the configs that ``_base_ = ['mapsage::demo/NAME.py']`` names.

Gap: MMEngine looks for the configs of a package in its distribution and writes the package as
``_scope_`` into every dictionary. A checkout of MapSage is no distribution, and MapSage registers its
classes in MMSegmentation's scope.
Remove when: MMEngine lets a package say where its configs are and which scope they have.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

from mmengine.config import Config

from mapsage_launcher.shipped import find_config

_PREFIX = 'mapsage::'


def apply() -> None:
    """Replace the method of MMEngine's config."""
    stock: Any = Config._get_cfg_path

    def _get_cfg_path(cfg_path: str, filename: str) -> Tuple[str, Optional[str]]:
        if cfg_path.startswith(_PREFIX):
            return str(find_config(cfg_path)), None
        path: Tuple[str, Optional[str]] = stock(cfg_path, filename)
        return path

    Config._get_cfg_path = staticmethod(_get_cfg_path)
