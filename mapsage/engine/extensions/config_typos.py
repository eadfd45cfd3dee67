"""Top-level keys of the config that nobody reads and that look like a typo."""
from __future__ import annotations

from typing import Optional

from mapsage.engine.config_mistakes import misspelling_note
from mapsage.engine.run_extension import EngineRun, RunExtension


class ConfigTypos(RunExtension):
    """Warns of misspelt keys."""

    def startup_warning(self, run: EngineRun) -> Optional[str]:
        return misspelling_note(run.cfg)
