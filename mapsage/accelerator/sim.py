"""Simulated GCUs of the S60 line: the code of the ``gcu`` accelerator on simulated devices."""
from __future__ import annotations

from typing import Optional

from . import simulator
from .gcu import GcuAccelerator


class SimAccelerator(GcuAccelerator):
    """Devices ``gcu:N`` in host memory, with ``eccl`` over gloo; ``auto`` never chooses them.

    Raises:
        SimulatorError: If the simulator cannot be built or one of its settings cannot be read.
    """

    name = 'sim'
    simulated = True

    def __init__(self) -> None:
        self.settings = simulator.load_simulator()

    @classmethod
    def why_unavailable(cls) -> Optional[str]:
        return simulator.why_unavailable()
