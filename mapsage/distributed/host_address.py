"""At which address this process listens for other ranks, and over which interface they talk.

An address is numeric, and one of this machine: listeners bind it and announce it. Where all ranks
are on one machine it is 127.0.0.1, so that no other machine reaches them.
"""

from __future__ import annotations

import os
import socket
from typing import MutableMapping

from mapsage_launcher.addresses import (
    LOOPBACK,
    AddressError,
    addresses_of,
    loopback_interface,
    own_address,
)

from .launcher import on_one_machine

_GLOO = 'GLOO_SOCKET_IFNAME'
# Interfaces of gloo, NCCL and ECCL. The last one is a guess by its likeness to NCCL.
_INTERFACE_VARIABLES = (_GLOO, 'NCCL_SOCKET_IFNAME', 'ECCL_SOCKET_IFNAME')


def reachable_host() -> str:
    """Return the numeric address at which this process listens, and the other ranks reach it.

    It is 127.0.0.1 where all ranks are on this machine. Otherwise it is that of the interface in
    ``GLOO_SOCKET_IFNAME``, else the one from which this machine reaches ``MASTER_ADDR``. Without a
    launcher it is 127.0.0.1.

    Raises:
        AddressError: If the interface has no address, ``MASTER_ADDR`` is not known here, or the
            others could not reach the address.
    """
    master, interface = os.environ.get('MASTER_ADDR'), os.environ.get(_GLOO, '').split(',')[0]
    if on_one_machine(os.environ) or not master and not interface:
        return LOOPBACK
    if interface:
        addresses = addresses_of(interface)
        if not addresses:
            names = ', '.join(name for _, name in socket.if_nameindex())
            raise AddressError(
                f'{_GLOO}={os.environ[_GLOO]!r}: expected an interface of this '
                f'machine that has an address, of {names}. `ip address` lists them.'
            )
        return addresses[0]
    assert master is not None
    try:
        return own_address(master)
    except AddressError as error:
        raise AddressError(f'MASTER_ADDR: {error}') from error
    except OSError as error:
        raise AddressError(
            f'MASTER_ADDR={master!r}: this machine finds no way to it ({error}). Use the numeric '
            f'address of machine 0, or name the interface between the machines in {_GLOO}.'
        ) from error


def keep_on_loopback(environ: MutableMapping[str, str]) -> None:
    """Let gloo, NCCL and ECCL listen on the loopback interface if all ranks are on this machine.

    Variables that the user has set stay.

    Raises:
        AddressError: If that interface is down.
    """
    unset = [name for name in _INTERFACE_VARIABLES if not environ.get(name)]
    if on_one_machine(environ) and unset:
        interface = loopback_interface()
        environ.update(dict.fromkeys(unset, interface))
