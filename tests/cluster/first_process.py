"""The first process of a machine: enters its namespaces, then forks what the machine runs.

    python tests/cluster/first_process.py NETWORK_NAMESPACE HOST_NAME HOSTS ADDRESS

Started as a fork of the test session's warm process, it has imported everything a rank needs. It is
a fork server itself (mapsage_launcher/ranks/fork_server.py), since an abstract socket belongs to a
network namespace, and a fork stays in that of its server.

HOSTS is the machine's /etc/hosts, ADDRESS the name of the server's socket.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys

from mapsage_launcher.ranks import fork_server  # the warm process has imported it

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000  # linux/sched.h
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000  # linux/mount.h
LIBC = ctypes.CDLL(None, use_errno=True)


def check(status: int) -> None:
    """Raise the error of a call of the C library."""
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def enter(namespace: str, name: str, hosts: str) -> None:
    """Enter the network namespace; take a host name, an /etc/hosts and a /dev/shm of its own."""
    with open(f'/run/netns/{namespace}') as network:
        check(LIBC.setns(network.fileno(), CLONE_NEWNET))
    check(LIBC.unshare(CLONE_NEWNS | CLONE_NEWUTS))
    check(LIBC.mount(None, b'/', None, MS_REC | MS_PRIVATE, None))
    check(LIBC.mount(hosts.encode(), b'/etc/hosts', None, MS_BIND, None))
    check(LIBC.mount(b'tmpfs', b'/dev/shm', b'tmpfs', 0, b'size=64m'))
    socket.sethostname(name)


def main() -> None:
    namespace, name, hosts, address = sys.argv[1:]
    enter(namespace, name, hosts)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f'\0{address}')
    listener.listen(128)
    print('ready', flush=True)
    fork_server._Server(listener, '', {}).serve()


if __name__ == '__main__':
    main()
