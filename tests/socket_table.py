"""The sockets at which processes listen, as the kernel knows them."""

from __future__ import annotations

import ipaddress
import os
import re
import struct
from pathlib import Path
from typing import Dict, Iterable, List, NamedTuple

_LISTEN, _UNCONNECTED = 0x0A, 0x07
_UNIX_ACCEPTS = 0x10000  # __SO_ACCEPTCON


class Listener(NamedTuple):
    """A socket to which others may connect, or send datagrams.

    Attributes:
        kind: ``'tcp'``, ``'udp'`` or ``'unix'``.
        address: Numeric address; of a Unix socket its name, ``'@'`` first if it is abstract.
        port: Port; 0 for a Unix socket.
        pid: A process that holds it.
    """

    kind: str
    address: str
    port: int
    pid: int

    @property
    def is_loopback(self) -> bool:
        """Whether no other machine reaches it."""
        return self.kind == 'unix' or ipaddress.ip_address(self.address).is_loopback


def listening(pids: Iterable[int]) -> List[Listener]:
    """Return the sockets at which these processes listen, in their network namespace."""
    owners: Dict[int, int] = {}
    for pid in pids:
        try:
            for entry in os.scandir(f'/proc/{pid}/fd'):
                target = re.match(r'socket:\[(\d+)\]$', os.readlink(entry.path))
                if target:
                    owners.setdefault(int(target.group(1)), pid)
        except OSError:  # it has ended, or closed the descriptor
            continue
    namespaces = {}  # a process of each network namespace
    for pid in owners.values():
        try:
            namespaces.setdefault(os.readlink(f'/proc/{pid}/ns/net'), pid)
        except OSError:
            continue
    listeners = []
    for pid in namespaces.values():
        listeners += [*_internet(pid, owners), *_unix(pid, owners)]
    return sorted(set(listeners))


def _lines(pid: int, name: str) -> List[List[str]]:
    path = Path(f'/proc/{pid}/net/{name}')
    try:
        return [line.split() for line in path.read_text().splitlines()[1:]]
    except OSError:  # a kernel without IPv6, or the process has ended
        return []


def _internet(pid: int, owners: Dict[int, int]) -> List[Listener]:
    listeners = []
    for name, state in (
        ('tcp', _LISTEN),
        ('tcp6', _LISTEN),
        ('udp', _UNCONNECTED),
        ('udp6', _UNCONNECTED),
    ):
        for fields in _lines(pid, name):
            inode = int(fields[9])
            if inode in owners and int(fields[3], 16) == state:
                address, port = fields[1].split(':')
                listeners.append(
                    Listener(name[:3], _address(address), int(port, 16), owners[inode])
                )
    return listeners


def _address(digits: str) -> str:
    # words of 32 bits in the machine's order
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(struct.pack(f'={len(words)}I', *words)))


def _unix(pid: int, owners: Dict[int, int]) -> List[Listener]:
    return [
        Listener('unix', fields[7] if len(fields) > 7 else '', 0, owners[int(fields[6])])
        for fields in _lines(pid, 'unix')
        if int(fields[6]) in owners and int(fields[3], 16) & _UNIX_ACCEPTS
    ]
