"""Features of a frozen encoder from a cache or from encoder ranks, the config's ``feature_source``.

A rank that only encodes has no Runner: ``engine/ranks/encoder_rank.py``.
"""
from __future__ import annotations

from typing import Any, Dict, List

from mapsage.engine.run_extension import EngineRun, RunExtension


class EncoderFeatures(RunExtension):
    """A hook replaces the images of a batch by their features."""

    def hook_configs(self, run: EngineRun) -> List[Dict[str, Any]]:
        if not run.cfg.get('feature_source'):
            return []
        return [dict(type='FeatureSourceHook', source=run.cfg.feature_source,
                     timeout=run.env.timeout)]
