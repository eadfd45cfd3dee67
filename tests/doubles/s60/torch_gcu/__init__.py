"""A double of Enflame's ``torch_gcu`` 2.10 (S60 line) that is imported as the vendor's is.

The devices and ``torch.gcu`` are the simulator's. What is imitated here is what the import of the
package does to a process, by the public source of 2.10.0: it puts its folder at the beginning of
``sys.path``, sets ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` (only the entry point restores it), registers
``eccl`` by the four classic arguments, and replaces functions of ``torch.serialization`` by copies.
With ``TORCH_GCU_DOUBLE_BROKEN`` in the environment the import fails, as without the driver.

Nothing here ran on a card, and nothing here is Enflame's code. The double of the T20 line's package
of the same name is in another folder.
"""

import os
import sys
import types
from pathlib import Path

_AUTOLOAD = 'TORCH_DEVICE_BACKEND_AUTOLOAD'
_autoload_before = os.environ.get(_AUTOLOAD)
sys.path.insert(0, str(Path(__file__).parent))
os.environ[_AUTOLOAD] = '0'

import torch  # noqa: E402

if 'TORCH_GCU_DOUBLE_BROKEN' in os.environ:
    raise OSError('libtopsrt.so.3: cannot open shared object file: No such file or directory')

import torch.distributed as dist  # noqa: E402

from mapsage.extras.simulator import device_module, read_settings  # noqa: E402
from mapsage.extras.simulator.load import add_devices  # noqa: E402

__version__ = '2.10.0.double'


def _make_eccl(store, rank, size, timeout):
    from mapsage.distributed.groups.staged import StagedProcessGroup

    return StagedProcessGroup(store, rank, size, timeout)


def _replace_serialization() -> None:
    """Replace the functions that torch_gcu replaces (gcu/storage_narrow.py) by copies of them."""
    for name in ('_save', '_load', '_legacy_save', '_legacy_load'):
        original = getattr(torch.serialization, name)
        copy = types.FunctionType(
            original.__code__,
            original.__globals__,
            f'{name}_of_gcu',
            original.__defaults__,
            original.__closure__,
        )
        copy.__kwdefaults__ = original.__kwdefaults__
        setattr(torch.serialization, name, copy)


gcu = types.ModuleType('torch.gcu')
vars(gcu).update(
    {name: value for name, value in vars(device_module).items() if not name.startswith('__')}
)
settings = read_settings(os.environ)
# As in 2.10, the properties of a device have no uuid; EFML lists those of all cards of the machine.
gcu.get_device_properties = lambda device=None: types.SimpleNamespace(
    name=gcu.get_device_name(device), total_memory=gcu.mem_get_info(device)[1]
)
gcu._raw_device_uuid_efml = lambda: [f'GCU-{card:04}' for card in range(max(settings.cards) + 1)]
gcu._get_efml_device_index = lambda index: settings.cards[index]
add_devices(settings, 'gcu', gcu)
dist.Backend.register_backend('eccl', _make_eccl, devices=['gcu'])
_replace_serialization()


def _autoload() -> None:
    """Restore the variable; PyTorch calls this where it loads the package by itself."""
    if _autoload_before is None:
        del os.environ[_AUTOLOAD]
    else:
        os.environ[_AUTOLOAD] = _autoload_before
