"""Peak memory of a step: the device's own count, or of this process on the CPU (Linux)."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from mapsage.accelerator import Accelerator
from mapsage.base.process import return_free_memory

_STATUS = Path('/proc/self/status')


class PeakMemory:
    """Bytes that are in use, and their peak since :meth:`restart`.

    Args:
        accelerator: Accelerator that carries out the steps.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._on_host = accelerator.device_type == 'cpu'

    def current(self) -> Optional[int]:
        """Return the bytes in use, or None if nobody counts them."""
        if not self._on_host:
            return self._accelerator.memory_allocated()
        # So that it does not count as used by the next step.
        return_free_memory()
        return _read_status('VmRSS')

    def restart(self) -> None:
        """Start a new peak."""
        if not self._on_host:
            self._accelerator.reset_peak_memory()
            return
        return_free_memory()
        try:
            # 5 resets the peak of the resident memory (proc(5)).
            Path('/proc/self/clear_refs').write_text('5')
        except OSError:
            # Not Linux, or not allowed: `peak` is the peak of the whole process.
            pass

    def peak(self) -> Optional[int]:
        """Return the peak in bytes, or None if nobody counts it."""
        if not self._on_host:
            return self._accelerator.max_memory_allocated()
        return _read_status('VmHWM')


def _read_status(name: str) -> Optional[int]:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith(f'{name}:')]
    return int(values[0]) * 1024 if values else None
