"""Requests to save and leave, such as SIGTERM: who listens, and when the run may end.

The requests are in ``mapsage_launcher/stop_request.py``, the answer in
``hooks/ranks/stop_hook.py``.
"""
from __future__ import annotations

from contextlib import contextmanager
from typing import ContextManager, Iterator

from mapsage.engine.guards import StopHook
from mapsage.engine.run_extension import EngineRun, RunExtension
from mapsage.host.runner import hooks_of_type
from mapsage_launcher.stop_request import listening


def listening_for_stops(run: EngineRun) -> ContextManager[None]:
    """Take SIGTERM and SIGUSR1 for requests while the context is open, if a StopHook answers them.
    """
    return listening(bool(hooks_of_type(run, StopHook)))


class StopRequests(RunExtension):
    """Hooks that can end the run are sorted last, after hooks that were registered later."""

    @contextmanager
    def training(self, run: EngineRun) -> Iterator[None]:
        run._hooks.sort(key=lambda hook: isinstance(hook, StopHook))
        yield
