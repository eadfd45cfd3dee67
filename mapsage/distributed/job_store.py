"""The rendezvous store of a job.

If all ranks are on one machine, none opens a port for it. Rank 0 makes a file without a name
(``private_store.py``) and hands its descriptor to the other ranks over a Unix socket; the kernel
says which user is at the other end. Each rank then has a ``FileStore`` on it, which lives as long
as any of them. A rank that is killed in the microseconds of a request may leave half an entry
there, for whose end all others wait: the launcher ends them. Ranks on several machines use a
``TCPStore``, see ``docs/security.md``.
"""
from __future__ import annotations

import array
import contextlib
import hashlib
import hmac
import ipaddress
import os
import socket
import struct
import sys
import threading
import time
from datetime import timedelta
from typing import Any, Dict, Mapping, Optional, Set, Union

import torch.distributed as dist

from mapsage.distributed.trust.job_secret import job_secret

from .launcher import ENCODERS_VARIABLE, on_one_machine
from .private_store import PrivateStoreError, file_path, loopback_store, private_file

# What tells apart the jobs of a user on a machine, and the starts of a job. Equal on all its ranks.
_IDENTITY = ('MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_RUN_ID', 'TORCHELASTIC_RESTART_COUNT',
             'SLURM_JOB_ID', 'SLURM_STEP_ID', 'SLURM_RESTART_COUNT', 'PMIX_NAMESPACE')
_FILE, _PORT, _AGAIN = 'file', 'port', 'again'
_MESSAGE = struct.Struct('<8si')  # one of these three, and the port
_RANK = struct.Struct('<q')
_CREDENTIALS = struct.Struct('3i')  # pid, uid, gid; of Linux
_ANSWER_SECONDS = 10.0  # in which a process of this user says its rank, or answers
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5

_OTHER_USER = ('another user of this machine listens in place of rank 0, so that the ranks of this '
               'job cannot meet. Set another MASTER_PORT, or MAPSAGE_SECRET.')
# A descriptor or a port by the name of the meeting: a process meets the others once.
_locations: Dict[bytes, Union[int, str]] = {}
_kept: Any = []  # stores that this process keeps for the others


def private_store(timeout: float) -> Optional[Any]:
    """Return a new client of the store of a job on one machine; None if it has several.

    Not a collective, but rank 0 must call it too: it makes the store.

    Args:
        timeout: Seconds to wait for rank 0, and for the answer to a request.

    Raises:
        PrivateStoreError: If rank 0 does not come, or this machine allows no private store.
        SecretError: If there is no secret that names the meeting.
    """
    if sys.platform != 'linux' or not on_one_machine(os.environ):
        return None
    name = _meeting_name(os.environ)
    if name not in _locations:
        _locations[name] = (_open(name, timeout) if os.environ['RANK'] == '0' else
                            _ask(name, timeout))
    location, limit = _locations[name], timedelta(seconds=timeout)
    if isinstance(location, str):
        return dist.TCPStore('127.0.0.1', int(location), is_master=False, timeout=limit,
                             wait_for_workers=False)
    store = dist.FileStore(file_path(location), -1)
    store.set_timeout(limit)
    return store


def shared_store(timeout: float) -> Any:
    """Return this rank's store of a job on several machines, which torch's ``env://`` would open.

    Where rank 0 keeps it, and ``MASTER_ADDR`` is a numeric address, it listens at that alone. With
    a name it is not certain under which address the others know this machine.

    Args:
        timeout: Seconds to wait for the other ranks, and for the answer to a request.
    """
    limit, host = timedelta(seconds=timeout), os.environ['MASTER_ADDR']
    descriptor: Optional[int] = None
    if (os.environ['RANK'] == '0' and os.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True'
            and 'master_listen_fd' in (dist.TCPStore.__init__.__doc__ or '')):
        with contextlib.suppress(ValueError, OSError):  # a name, or not of this machine
            family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
            with socket.create_server((host, int(os.environ['MASTER_PORT'])), family=family,
                                      backlog=1024) as listener:
                descriptor = os.dup(listener.fileno())
    if descriptor is None:
        return next(dist.rendezvous('env://', timeout=limit))[0]
    # Another store of this process at this port, as env:// would open it, is the same one.
    return dist.TCPStore(host, int(os.environ['MASTER_PORT']), int(os.environ['WORLD_SIZE']), True,
                         timeout=limit, multi_tenant=True, master_listen_fd=descriptor)


def _meeting_name(environ: Mapping[str, str]) -> bytes:
    """Return the address of an abstract Unix socket, which nobody without the secret can guess."""
    job = '\0'.join([str(os.getuid()), *(environ.get(name, '') for name in _IDENTITY)])
    digest = hmac.new(job_secret(environ), job.encode('utf-8', 'surrogateescape'), hashlib.sha256)
    return f'\0mapsage-store-{digest.hexdigest()[:32]}'.encode()


def _open(name: bytes, timeout: float) -> Union[int, str]:
    """Make the store and let the other ranks in, each once; return where it is."""
    peers = int(os.environ['WORLD_SIZE']) + int(os.environ.get(ENCODERS_VARIABLE, '0')) - 1
    location: Union[int, str]
    try:
        location = private_file()
    except OSError as error:
        store, warning = loopback_store(error, timedelta(seconds=timeout))
        sys.stderr.write(f'{warning}\n')
        sys.stderr.flush()
        _kept.append(store)
        location = str(store.port)
    if peers > 0:
        listener = _listen(name, time.monotonic() + timeout)
        threading.Thread(target=_let_in, args=(listener, location, peers), daemon=True,
                         name='mapsage job store').start()
    return location


def _listen(name: bytes, deadline: float) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while True:
        try:
            listener.bind(name)
            listener.listen(1024)
            return listener
        except OSError as error:  # an earlier run of the same job is still ending
            _check_holder(name)
            if time.monotonic() > deadline:
                listener.close()
                raise PrivateStoreError(
                    f'another job of this user has the same MASTER_PORT='
                    f"{os.environ.get('MASTER_PORT')} and still waits for its ranks ({error}). "
                    f'End it, or choose another port.') from error
            time.sleep(_FIRST_PAUSE)


def _check_holder(name: bytes) -> None:
    """Raise PrivateStoreError if another user has taken the name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(name)
        except OSError:
            return
        if _user_of(connection) != os.geteuid():
            raise PrivateStoreError(_OTHER_USER)


def _let_in(listener: socket.socket, location: Union[int, str], peers: int) -> None:
    came: Set[int] = set()
    with listener:
        # A rank that comes twice belongs to the next run of the job, and waits for its rank 0.
        while len(came) < peers:
            connection, _ = listener.accept()
            with connection:
                try:
                    if _user_of(connection) != os.geteuid():
                        continue
                    connection.settimeout(_ANSWER_SECONDS)
                    rank, = _RANK.unpack(connection.recv(_RANK.size))
                    _answer(connection, _AGAIN if rank in came else location)
                    came.add(rank)
                except (OSError, struct.error):  # it has ended
                    continue


def _answer(connection: socket.socket, location: Union[int, str]) -> None:
    if isinstance(location, int):
        connection.sendmsg([_MESSAGE.pack(_FILE.encode(), 0)],
                           [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [location]))])
    elif location == _AGAIN:
        connection.sendmsg([_MESSAGE.pack(_AGAIN.encode(), 0)])
    else:
        connection.sendmsg([_MESSAGE.pack(_PORT.encode(), int(location))])


def _ask(name: bytes, timeout: float) -> Union[int, str]:
    """Return where the store is, which rank 0 says."""
    deadline, pause, why = time.monotonic() + timeout, _FIRST_PAUSE, ''
    while True:
        try:
            location = _ask_once(name)
            if location is not None:
                return location
            why = 'it belongs to an earlier run'
        except OSError as error:
            why = str(error)
        if time.monotonic() > deadline:
            raise PrivateStoreError(
                f"rank {os.environ['RANK']} did not reach rank 0 of its job on this machine within "
                f'{timeout:g} s ({why}). It did not start, was stopped, or has ended: look at the '
                f'last lines in its log. All ranks need the same MASTER_ADDR, MASTER_PORT and '
                f'MAPSAGE_SECRET.', [0])
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _ask_once(name: bytes) -> Optional[Union[int, str]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        connection.connect(name)
        if _user_of(connection) != os.geteuid():
            raise PrivateStoreError(_OTHER_USER)
        connection.send(_RANK.pack(int(os.environ['RANK'])))
        descriptors = array.array('i')
        data, ancillary, _, _ = connection.recvmsg(
            _MESSAGE.size, socket.CMSG_SPACE(descriptors.itemsize))
    if not data:
        raise ConnectionResetError('it closed the connection')
    kind, port = _MESSAGE.unpack(data)
    for _, _, content in ancillary:
        descriptors.frombytes(content[:descriptors.itemsize])
    kind = kind.rstrip(b'\0').decode()
    if kind == _FILE:
        os.set_inheritable(descriptors[0], False)
        return descriptors[0]
    return None if kind == _AGAIN else str(port)


def _user_of(connection: socket.socket) -> int:
    """Return the id of the user at the other end of a Unix socket, as the kernel knows it."""
    facts = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(facts)[1])
