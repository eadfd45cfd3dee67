"""Under which address the other ranks reach this host."""
from __future__ import annotations

import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface


def reachable_host() -> str:
    """Return the address or name under which the other ranks reach this process.

    It is that of the interface in ``GLOO_SOCKET_IFNAME``, if there is one with an address, else
    the one from which this host reaches ``MASTER_ADDR``. Where that is a loopback address, this is
    the host of ``MASTER_ADDR``, and the other ranks know it by that name. Where it cannot be found
    out, it is the host's own name.
    """
    interface = os.environ.get('GLOO_SOCKET_IFNAME', '').split(',')[0]
    master = os.environ.get('MASTER_ADDR') or socket.gethostname()
    if interface:
        try:
            return _address_of(interface)
        except OSError:  # not on this host, or without an IPv4 address
            pass
    try:
        family, kind, _, _, place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError:
        # without MASTER_ADDR it is the host's own name that nobody knows
        return socket.gethostname() if os.environ.get('MASTER_ADDR') else '127.0.0.1'
    if address.startswith('127.') or address == '::1':
        return os.environ.get('MASTER_ADDR') or address
    return address


def _address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface."""
    request = struct.pack('256s', interface[:15].encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
