"""Addresses of this machine: how it reaches another one, and which interface has which address.

They are numeric, since the name of a machine is often unknown on the others. These functions do not
read the environment of a job; `mapsage/distributed/host_address.py` does. While a process waits at
MASTER_ADDR, :func:`wait_explained` says what the name stands for.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Iterator, List, Tuple

from mapsage_launcher.errors import UserError

LOOPBACK = '127.0.0.1'
# Linux: flags and IPv4 address of an interface
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_IFF_UP = 1
# A wait for MASTER_ADDR is explained after the first of these seconds (of a short wait, a quarter),
# at the latest after the sum of all three.
_PATIENCE_SECONDS, _LOOKUP_SECONDS, _CONNECT_SECONDS = 8.0, 4.0, 4.0


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
        f'the ranks of one machine talk over it: run `ip link set lo up` as root.'
    )


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
        raise AddressError(
            f'{host} stands for {address} on this machine, where the others cannot '
            f'reach it: use its address instead.'
        )
    return address


@contextlib.contextmanager
def wait_explained(host: str, port: int, keeps_store: bool, limit: float) -> Iterator[None]:
    """Print what MASTER_ADDR stands for and whether anything answers, if the block waits or fails.

    Args:
        host: Value of MASTER_ADDR.
        port: Port at which the ranks meet.
        keeps_store: Whether this process listens there, as machine 0 or rank 0 does.
        limit: Seconds after which the wait of the block ends.
    """
    hurry, over = threading.Event(), threading.Event()

    def explain() -> None:
        hurry.wait(min(_PATIENCE_SECONDS, limit / 4))
        if over.is_set():
            return
        problem = meeting_problem(host, port, keeps_store)
        if problem and not over.is_set():
            sys.stderr.write(f'warning: {problem} The wait may last {limit:g} s.\n')
            sys.stderr.flush()

    thread = threading.Thread(target=explain, daemon=True, name='mapsage meeting')
    thread.start()
    try:
        yield
    # A torch that gives up at once; also the end of a wait that was too short to be explained.
    except (RuntimeError, ValueError):
        hurry.set()
        thread.join()
        raise
    finally:
        over.set()
        hurry.set()


def meeting_problem(host: str, port: int, keeps_store: bool) -> str:
    """Return why a process still waits at MASTER_ADDR; '' if it waits only for late ranks.

    Args:
        host: Value of MASTER_ADDR.
        port: Port at which the ranks meet.
        keeps_store: Whether this process listens there.
    """
    addresses, reason = _lookup(host)
    local = [address for _, name in socket.if_nameindex() for address in addresses_of(name)]
    here = f'this machine has {", ".join(local)}'
    if not addresses:
        return (
            f'MASTER_ADDR={host!r} stands for no address here ({reason}); {here}. Use the '
            f'numeric address of machine 0, or add the name to /etc/hosts.'
        )
    stands = f'MASTER_ADDR={host!r} stands for {", ".join(addresses)} here'
    is_local = any(map(_can_listen, addresses))
    reason = _refusal(addresses, port)
    answer = (
        f'nothing answers there at port {port} ({reason})'
        if reason
        else (f'something answers there at port {port}')
    )
    if keeps_store and not is_local:
        return (
            f'{stands}, and {here}: {answer}. Rank 0 keeps the store of the job at '
            f'MASTER_ADDR, so this must be an address of its machine, or one that is forwarded '
            f'to it (a Service of Kubernetes): set MASTER_ADDR alike on all machines, and '
            f'NODE_RANK=0 or RANK=0 on that one.'
        )
    if not keeps_store:
        # A process that reaches the store waits no longer: what answers may be another program.
        local_hint = ', an address of this machine itself' if is_local else ''
        return (
            f'{stands}{local_hint}: {answer}, and the store of the job was not reached; '
            f'{here}. Machine 0 has not started, has another address, or a firewall is '
            f'between: look at MASTER_ADDR and MASTER_PORT, which must be alike on all '
            f'machines.'
        )
    # Rank 0 keeps the store here and waits for ranks that are late.
    return f'{stands}: {answer}; {here}.' if reason else ''


def _refusal(addresses: List[str], port: int) -> str:
    """Return why no address of a host accepts a connection; '' if one of them does."""
    reasons = []
    for address in addresses:
        try:
            socket.create_connection((address, port), _CONNECT_SECONDS / len(addresses)).close()
            return ''
        except OSError as error:
            reasons.append(str(error))
    return reasons[0]


def _lookup(host: str) -> Tuple[List[str], str]:
    """Return the addresses of a host; without any, also the reason."""
    addresses: List[str] = []
    reasons: List[str] = []

    def look() -> None:
        try:
            entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            addresses.extend(dict.fromkeys(str(entry[4][0]) for entry in entries))
        # UnicodeError: a label of the name is empty or has more than 63 letters.
        except (OSError, UnicodeError) as error:
            reasons.append(str(error))

    # A name server that does not answer takes minutes.
    thread = threading.Thread(target=look, daemon=True, name='mapsage lookup')
    thread.start()
    thread.join(_LOOKUP_SECONDS)
    return list(addresses), ''.join(reasons) or f'no answer within {_LOOKUP_SECONDS:g} s'


def _can_listen(address: str) -> bool:
    """Return whether an address is one of this machine."""
    family = socket.AF_INET6 if ':' in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    # Another machine has the address, or the kernel has no IPv6.
    except OSError:
        return False
    return True


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
        local = [
            socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line[0]))
            for line in lines
            if line[5] == interface
        ]
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
