"""A test double of Enflame's T20 ``torch_gcu`` (TopsRider 2.x, torch 1.10), over torch_xla.

Written from what is known of torch_gcu 1.10.0+2.5.136: names, signatures, order of calls and traps.
Nothing here ran on a T20, and nothing here is Enflame's code. Tests put this folder's parent on
PYTHONPATH; it is never installed, and MapSage does not know it from the real thing.

What is real: the devices are lazy ``xla:N`` devices (PJRT, CPU), graphs are compiled and run, and
collectives go between processes (over gloo, by way of host memory). Tensors of two devices that
meet end the process.

Where it differs from a T20, on purpose:

- Every process has cards of its own: two that use ``xla:3`` do not share memory. 8 cards are
  visible (``TORCH_GCU_DOUBLE_DEVICES``), fewer under ``TOPS_VISIBLE_DEVICES``.
- 64-bit numbers keep 64 bits. What a T20 does with them is not known; Enflame's ModelZoo hands it
  int32 labels. (``XLA_USE_32BIT_LONG`` cannot stand in: torch_xla 2.9 fails to lower with it.)
- DDP reduces after the backward pass in one host copy; the real one does so inside its graph.
- ``get_hbm_alloc_size`` counts the tensors that Python holds.

Not here: point-to-point calls, ``DistributedSampler``, ZeRO, profiling, HBM dumps.
"""

from . import amp, distributed, nn
from .core.device import (
    current_device,
    device,
    device_count,
    gcu_device,
    get_device_name,
    get_hbm_alloc_size,
    is_available,
    manual_seed_all,
    set_device,
)
from .core.model import (
    JitRunMode,
    clear_graph_caches,
    collect_amp_training_params,
    collect_buffers,
    fetch_gradients,
    optimizer_step,
    sync_lived_tensor,
    synchronize,
    unlazy,
)

__version__ = '1.10.0+2.5.136'
__all__ = [
    'JitRunMode',
    'amp',
    'clear_graph_caches',
    'collect_amp_training_params',
    'collect_buffers',
    'current_device',
    'device',
    'device_count',
    'distributed',
    'fetch_gradients',
    'gcu_device',
    'get_device_name',
    'get_hbm_alloc_size',
    'is_available',
    'manual_seed_all',
    'nn',
    'optimizer_step',
    'set_device',
    'sync_lived_tensor',
    'synchronize',
    'unlazy',
]
