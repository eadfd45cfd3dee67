"""Let MMEngine use CUDA only in a run that computes on CUDA.

Gap: MMEngine (0.10.7 and onedl-mmengine) takes a visible GPU for the run's device. On a machine
with GPUs, a run on the CPU or on another vendor's devices therefore initializes CUDA to list the
GPUs in the log, and asks CUDA for the memory of ``model.output_device``, which fails with "Expected
a cuda device" where the outputs are elsewhere, as they may be in a model over a GPU and the CPU.
Remove when: mmengine asks ``get_device()`` there, and queries the memory of CUDA devices only.
"""

from __future__ import annotations

import importlib

from mmengine.device import get_device, get_max_cuda_memory, is_cuda_available
from mmengine.runner import LogProcessor, Runner

# By name, because mmengine.utils.dl_utils.collect_env is also the name of a function.
_MODULES = (
    'mmengine.hooks.empty_cache_hook',
    'mmengine.runner.log_processor',
    'mmengine.runner.utils',
    'mmengine.utils.dl_utils.collect_env',
)

_host_max_memory = LogProcessor._get_max_memory


def _uses_cuda() -> bool:
    return get_device() == 'cuda' and is_cuda_available()


def _max_memory(self: LogProcessor, runner: Runner) -> int:
    """Return the highest memory peak, in MiB, of the CUDA devices with parameters of the model."""
    devices = {parameter.device for parameter in runner.model.parameters() if parameter.is_cuda}
    if not devices:
        return _host_max_memory(self, runner)
    # The query also resets the peak of the current device, which is the first of several.
    return max([get_max_cuda_memory(device) for device in sorted(devices, key=str)])


def apply() -> None:
    """Replace the test for CUDA in MMEngine's modules, and the query of the memory."""
    for name in _MODULES:
        setattr(importlib.import_module(name), 'is_cuda_available', _uses_cuda)  # noqa: B010
    LogProcessor._get_max_memory = _max_memory
