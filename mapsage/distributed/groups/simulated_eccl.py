"""The ``eccl`` backend of the simulated GCU: a staged group with eccl's limits and faults."""
from __future__ import annotations

import time
from typing import Any

import torch

from mapsage.accelerator import Accelerator

from .staged import CollectiveError, StagedProcessGroup, register_staged_backend

# ProcessGroupECCL.cpp of torch_gcu 2.10 maps kDouble and kLong to 32 bits.
_NARROWED = {torch.float64: torch.float32, torch.int64: torch.int32}


def register_simulated_backend(accelerator: Accelerator) -> None:
    """Register the native backend of a simulated accelerator."""
    stalled = getattr(accelerator, 'settings').stalled_collective  # noqa: B009  (SimAccelerator's)

    class SimulatedEccl(StagedProcessGroup):
        """64-bit numbers travel as 32 bits, and one collective may stall."""

        def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
            return _NARROWED.get(dtype, dtype)

        def before_collective(self, number: int) -> None:
            if number == stalled:
                # As with a hung card and its watchdog: wait beyond the others' deadline, then fail.
                seconds: Any = self._timeout.total_seconds()
                time.sleep(seconds + 5)
                raise CollectiveError(
                    f'collective {number} stalled on rank {self.rank()} for {seconds + 5:g} s '
                    f'(simulated fault: MAPSAGE_SIM_FAULTS)')

    register_staged_backend(accelerator.device_type, accelerator.communication, SimulatedEccl)
