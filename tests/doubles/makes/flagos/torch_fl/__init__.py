"""A double of FlagOS' torch_fl: few functions, and its backend under PyTorch's name of the type.

It lacks ``manual_seed_all``, figures of memory and the model of a card.
"""

import torch.distributed as dist
from make_double import add_make, make_group

__version__ = '2.10.0.double'
flagos = add_make(
    'flagos',
    'FLAGOS_VISIBLE_DEVICES',
    (
        'is_available',
        'device_count',
        'current_device',
        'set_device',
        'synchronize',
        'manual_seed',
        'get_amp_supported_dtype',
        'get_rng_state',
        'set_rng_state',
        '_is_in_bad_fork',
        '_lazy_init',
    ),
)
dist.Backend.register_backend('flagos', make_group('flagos'), devices=['privateuseone'])
