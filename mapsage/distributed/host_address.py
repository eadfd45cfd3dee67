"""At which address this process listens for other ranks, and over which interface they talk.

An address is numeric, and one of this machine: listeners bind it and announce it. Where all ranks
are on one machine it is 127.0.0.1, so that no other machine reaches them.

The functions that do not read the environment need only the standard library, since
``nodes/elastic.py`` loads this file by its path.
"""
from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path
from typing import List, MutableMapping

if __package__:
    from mapsage.errors import UserError
else:
    # The launcher loads this file by its path: it prints the errors itself, and importing mapsage
    # would take seconds.
    UserError = type('UserError', (Exception,), {})  # type: ignore[misc,assignment]

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # of Linux: flags and IPv4 address of an interface
_IFF_UP = 1
_LOOPBACK = '127.0.0.1'
_GLOO = 'GLOO_SOCKET_IFNAME'
# Interfaces of gloo, NCCL and ECCL. The last one is a guess by its likeness to NCCL.
_INTERFACE_VARIABLES = (_GLOO, 'NCCL_SOCKET_IFNAME', 'ECCL_SOCKET_IFNAME')


class AddressError(UserError, ValueError):
    """This machine has no address or interface at which the other ranks could reach it."""


def reachable_host() -> str:
    """Return the numeric address at which this process listens, and the other ranks reach it.

    It is 127.0.0.1 where all ranks are on this machine. Otherwise it is that of the interface in
    ``GLOO_SOCKET_IFNAME``, else the one from which this machine reaches ``MASTER_ADDR``. Without a
    launcher it is 127.0.0.1.

    Raises:
        AddressError: If the interface has no address, ``MASTER_ADDR`` is not known here, or the
            others could not reach the address.
    """
    from mapsage.distributed.launcher import on_one_machine
    master, interface = os.environ.get('MASTER_ADDR'), os.environ.get(_GLOO, '').split(',')[0]
    if on_one_machine(os.environ) or not master and not interface:
        return _LOOPBACK
    if interface:
        addresses = addresses_of(interface)
        if not addresses:
            names = ', '.join(name for _, name in socket.if_nameindex())
            raise AddressError(f'{_GLOO}={os.environ[_GLOO]!r}: expected an interface of this '
                               f'machine that has an address, of {names}. `ip address` lists them.')
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
    from mapsage.distributed.launcher import on_one_machine
    unset = [name for name in _INTERFACE_VARIABLES if not environ.get(name)]
    if on_one_machine(environ) and unset:
        interface = loopback_interface()
        environ.update(dict.fromkeys(unset, interface))


def loopback_interface() -> str:
    """Return the name of the interface that has the address 127.0.0.1.

    Raises:
        AddressError: If there is none, or it is down.
    """
    names = [name for _, name in socket.if_nameindex()]
    if sys.platform != 'linux':
        return 'lo0' if 'lo0' in names else 'lo'
    for name in names:
        if _LOOPBACK in addresses_of(name) and _is_up(name):
            return name
    raise AddressError(
        f'no interface of this machine (or container) has the address {_LOOPBACK} and is up, and '
        f'the ranks of one machine talk over it: run `ip link set lo up` as root.')


def own_address(host: str, port: int = 9) -> str:
    """Return the numeric address from which this machine reaches another one.

    The name of a host is often not known on the others, or stands for 127.0.1.1 on itself: then
    this is the address of the default route.

    Args:
        host: Name or address.
        port: Port there; nothing is sent to it.

    Raises:
        AddressError: If the others could not reach it.
        OSError: If the name is not known, or there is no route to it.
    """
    address = _address_towards(host, port)
    if host == 'localhost' or _is_loopback(host) or not _is_loopback(address):
        return address
    with contextlib.suppress(OSError):  # there is no default route
        address = _address_towards('192.0.2.1', 9)
    if _is_loopback(address):
        raise AddressError(f'{host} stands for {address} on this machine, where the others cannot '
                           f'reach it: use its address instead.')
    return address


def addresses_of(interface: str) -> List[str]:
    """Return the addresses of a network interface, IPv4 first, link-local ones last; Linux only."""
    addresses = []
    request = struct.pack('256s', interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):  # no such interface, or without an IPv4 address
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            addresses.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):  # a kernel without IPv6
        lines = [line.split() for line in Path('/proc/net/if_inet6').read_text().splitlines()]
        local = [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line[0]))
                 for line in lines if line[5] == interface]
        plain = [address for address in local if not address.startswith('fe80:')]
        # Of a link-local address the interface is a part.
        addresses += plain + [f'{address}%{interface}' for address in local if address not in plain]
    return addresses


def _is_up(interface: str) -> bool:
    request = struct.pack('256s', interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, request)
    return bool(struct.unpack('<H', answer[16:18])[0] & _IFF_UP)


def _is_loopback(address: str) -> bool:
    return address.startswith('127.') or address == '::1'


def _address_towards(host: str, port: int) -> str:
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing
        return str(probe.getsockname()[0])
