"""Addresses of this machine: how it reaches another one, and which interface has which address.

They are numeric, since the name of a machine is often unknown on the others. These functions do not
read the environment of a job; `mapsage/distributed/host_address.py` does.
"""
from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import sys
from pathlib import Path
from typing import List

from mapsage_launcher.errors import UserError

LOOPBACK = '127.0.0.1'
# Linux: flags and IPv4 address of an interface
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_IFF_UP = 1


class AddressError(UserError, ValueError):
    """This machine has no address or interface at which the other ranks could reach it."""


def loopback_interface() -> str:
    """Return the name of the interface with the address 127.0.0.1.

    Raises:
        AddressError: If no interface has it, or the interface is down.
    """
    names = [name for _, name in socket.if_nameindex()]
    if sys.platform != 'linux':
        return 'lo0' if 'lo0' in names else 'lo'
    for name in names:
        if LOOPBACK in addresses_of(name) and _is_up(name):
            return name
    raise AddressError(
        f'no interface of this machine (or container) has the address {LOOPBACK} and is up, and '
        f'the ranks of one machine talk over it: run `ip link set lo up` as root.')


def own_address(host: str, port: int = 9) -> str:
    """Return the numeric address of this machine on the way to another machine.

    On many systems a machine's own name stands for 127.0.1.1 on itself. If ``host`` is such a name,
    the result is the address of the default route.

    Args:
        host: Name or address of the other machine.
        port: Port of the other machine; nothing is sent to it.

    Raises:
        AddressError: If other machines could not reach the address.
        OSError: If the name is unknown, or there is no route to it.
    """
    address = _address_towards(host, port)
    if host == 'localhost' or _is_loopback(host) or not _is_loopback(address):
        return address
    # Without a default route this fails, and the address stays.
    with contextlib.suppress(OSError):
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
        # The interface may not exist, or have no IPv4 address.
        with contextlib.suppress(OSError):
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            addresses.append(socket.inet_ntoa(answer[20:24]))
    # A kernel without IPv6 lacks the file.
    with contextlib.suppress(OSError):
        lines = [line.split() for line in Path('/proc/net/if_inet6').read_text().splitlines()]
        local = [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line[0]))
                 for line in lines if line[5] == interface]
        plain = [address for address in local if not address.startswith('fe80:')]
        # A link-local address is valid only with the name of its interface.
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
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Connecting a datagram socket chooses a route and sends nothing.
        probe.connect(target)
        return str(probe.getsockname()[0])
