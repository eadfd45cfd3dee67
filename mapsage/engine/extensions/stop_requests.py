"""Order of the hooks that may end the run, such as after SIGTERM; see ``hooks/ranks/stop_hook.py``.
"""
from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

from mapsage.engine.run_extension import EngineRun, RunExtension
from mapsage.hooks import StopHook


class StopRequests(RunExtension):
    """Hooks that can end the run are sorted last, after hooks that were registered later."""

    @contextmanager
    def training(self, run: EngineRun) -> Iterator[None]:
        run._hooks.sort(key=lambda hook: isinstance(hook, StopHook))
        yield
