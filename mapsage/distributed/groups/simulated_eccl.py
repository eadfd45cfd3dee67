"""The ``eccl`` backend of the simulated GCU: a staged group with eccl's limits and faults.

It makes a program fail on a machine without GCUs where it would fail with them. The settings are in
``mapsage/accelerator/simulator/``.
"""
from __future__ import annotations

import time

import torch

from mapsage.accelerator.sim import SimAccelerator

from .staged import CollectiveError, StagedProcessGroup, register_staged_backend

# ProcessGroupECCL.cpp of torch_gcu 2.10 maps kDouble and kLong to 32 bits.
_NARROWED = {torch.float64: torch.float32, torch.int64: torch.int32}


def register_simulated_backend(accelerator: SimAccelerator) -> None:
    """Register the native backend of a simulated accelerator."""
    stalled = accelerator.settings.stalled_collective

    class SimulatedEccl(StagedProcessGroup):
        """Sends 64-bit numbers as 32 bits; one collective may stall."""

        def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
            return _NARROWED.get(dtype, dtype)

        def before_collective(self, number: int) -> None:
            if number == stalled:
                # Like a hung card with a watchdog: fail after the deadline of the other ranks.
                seconds = self.collective_timeout.total_seconds() + 5
                time.sleep(seconds)
                raise CollectiveError(
                    f'collective {number} stalled on rank {self.rank()} for {seconds:g} s '
                    f'(simulated fault: MAPSAGE_SIM_FAULTS)')

    register_staged_backend(accelerator.device_type, accelerator.communication, SimulatedEccl)
