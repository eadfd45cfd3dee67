"""Simulated GCUs of the S60 line: the ``gcu`` accelerator's own code over the simulator."""
from __future__ import annotations

from typing import Optional

from . import simulator
from .gcu import GcuAccelerator


class SimAccelerator(GcuAccelerator):
    """Devices ``gcu:N`` in host memory; ``eccl`` over gloo. For rehearsals, by name only.

    Raises:
        SimulatorError: If the simulator cannot be built or a setting of its cannot be read.
    """

    name = 'sim'
    simulated = True

    def __init__(self) -> None:
        self.settings = simulator.load_simulator()

    @classmethod
    def why_unavailable(cls) -> Optional[str]:
        return simulator.why_unavailable()
