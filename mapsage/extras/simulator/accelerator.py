"""Simulated GCUs of the S60 line: the code of the ``gcu`` accelerator on simulated devices."""

from __future__ import annotations

from typing import Dict, Mapping, Optional

from mapsage.accelerator.base import Supports
from mapsage.accelerator.cuda import set_workspace
from mapsage.accelerator.gcu import GcuAccelerator, int64_problem
from mapsage.extras import simulator


class SimAccelerator(GcuAccelerator):
    """Devices ``gcu:N`` in host memory, with ``eccl`` over gloo; ``auto`` never chooses them.

    Raises:
        SimulatorError: If the simulator cannot be built or one of its settings cannot be read.
    """

    name = 'sim'
    simulated = True
    # As on the S60 line, also where the CPU's kernels could do more: a rehearsal takes the same
    # paths as the cards.
    supports = Supports(sync_bn=False, float64=False, int64=False)

    def __init__(self) -> None:
        self.settings = simulator.load_simulator()

    def register_backend(self) -> None:
        # Not at the top of the file, because torch 1.10 has no groups written in Python.
        from .simulated_eccl import register_simulated_backend

        register_simulated_backend(self)

    def make_deterministic(self) -> Optional[str]:
        return set_workspace() if self.settings.needs_workspace_setting else None

    def environment_problem(self, environ: Mapping[str, str]) -> Optional[str]:
        profile = self.settings.profile
        return (
            None
            if profile.int64_arithmetic
            else int64_problem(
                f'MAPSAGE_SIM_GCU={profile.name}', f'the simulated {profile.software}'
            )
        )

    def native_bfloat16(self) -> Optional[bool]:
        return None

    def describe_probes(self) -> Optional[str]:
        return None

    def software(self) -> Dict[str, str]:
        return {}

    @classmethod
    def why_unavailable(cls) -> Optional[str]:
        return simulator.why_unavailable()
