"""Opens the rendezvous store of a job: a private file on one machine, a port on several.

If all ranks are on one machine, no rank opens a port. Rank 0 makes a file without a name
(``private_store.py``) and sends its descriptor to the other ranks over a Unix socket. The kernel
tells each end the other's user. Each rank then opens a ``FileStore`` on the file, which lives as
long as any rank. A rank killed in the microseconds of a request may leave half an entry in the
file. The other ranks wait for the rest of it until the launcher ends them.

Ranks on several machines use a ``TCPStore``, see ``docs/explanation/security.md``.
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
from typing import Dict, List, Mapping, Optional, Set, Union

import torch.distributed as dist

from mapsage_launcher.addresses import wait_explained
from mapsage_launcher.trust.job_secret import job_secret
from mapsage_launcher.trust.private_store import (
    PrivateStoreError,
    file_path,
    loopback_store,
    private_file,
)

from .launcher import ENCODERS_VARIABLE, on_one_machine
from .torchrun_rounds import current_round

# These variables distinguish the jobs of a user on a machine and the restarts of a job. They are
# equal on all ranks of a job.
_IDENTITY = (
    'MASTER_ADDR',
    'MASTER_PORT',
    'TORCHELASTIC_RUN_ID',
    'TORCHELASTIC_RESTART_COUNT',
    'SLURM_JOB_ID',
    'SLURM_STEP_ID',
    'SLURM_RESTART_COUNT',
    'PMIX_NAMESPACE',
)
_FILE, _PORT, _AGAIN = 'file', 'port', 'again'
# One of the three words above, and the port.
_MESSAGE = struct.Struct('<8si')
_RANK = struct.Struct('<q')
# Linux's struct ucred: pid, uid, gid.
_CREDENTIALS = struct.Struct('3i')
# Time in which a process of this user must send its rank, or its answer.
_ANSWER_SECONDS = 10.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5

_OTHER_USER = (
    'another user of this machine listens in place of rank 0, so that the ranks of this '
    'job cannot meet. Set another MASTER_PORT, or MAPSAGE_SECRET.'
)
# A store's location is the descriptor of a file, as a number, or a port, as a text.
_Location = Union[int, str]
# Locations by the name of the meeting. A process takes part in a meeting only once.
_locations: Dict[bytes, _Location] = {}
# Stores that this process keeps for the other ranks: they live as long as the process.
_kept_stores: List[dist.Store] = []


def private_store(timeout: float) -> Optional[dist.Store]:
    """Return a new client of the store of a job on one machine; None if the job has several.

    This is not collective, but rank 0 must call it too, because it makes the store.

    Args:
        timeout: Seconds to wait for rank 0, and for the answer to a request.

    Raises:
        PrivateStoreError: If rank 0 does not come, or this machine allows no private store.
        SecretError: If this process has no secret, which the name of the meeting depends on.
    """
    if sys.platform != 'linux' or not on_one_machine(os.environ):
        return None
    name = _meeting_name(os.environ)
    if name not in _locations:
        _locations[name] = (
            _open_store(name, timeout)
            if os.environ['RANK'] == '0'
            else _request_location(name, timeout)
        )
    location, limit = _locations[name], timedelta(seconds=timeout)
    if isinstance(location, str):
        return dist.TCPStore(
            '127.0.0.1', int(location), is_master=False, timeout=limit, wait_for_workers=False
        )
    store = dist.FileStore(file_path(location), -1)
    store.set_timeout(limit)
    return store


def shared_store(timeout: float) -> dist.Store:
    """Return this rank's client of the store of a job on several machines, as ``env://`` does.

    If rank 0 keeps the store and ``MASTER_ADDR`` is a numeric address of this machine, the store
    listens at that address only. With a host name it listens at all addresses, because other
    machines may resolve the name to another address.

    Args:
        timeout: Seconds to wait for the other ranks, and for the answer to a request.
    """
    limit, this_round = timedelta(seconds=timeout), current_round()
    if this_round is not None:
        os.environ.update(this_round.meet(os.environ, limit))
    host, port = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])
    keeps_store = (
        os.environ['RANK'] == '0' and os.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True'
    )
    # One rank of a machine speaks for all.
    if os.environ.get('LOCAL_RANK', '0') != '0':
        store = _open_shared_store(host, port, keeps_store, limit)
    else:
        with wait_explained(host, port, keeps_store, timeout):
            store = _open_shared_store(host, port, keeps_store, limit)
    return store if this_round is None else dist.PrefixStore(str(this_round.number), store)


def _open_shared_store(host: str, port: int, keeps_store: bool, limit: timedelta) -> dist.Store:
    descriptor: Optional[int] = None
    if keeps_store and 'master_listen_fd' in (dist.TCPStore.__init__.__doc__ or ''):
        # Suppressed: MASTER_ADDR is a host name, or an address of another machine.
        with contextlib.suppress(ValueError, OSError):
            family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
            with socket.create_server((host, port), family=family, backlog=1024) as listener:
                descriptor = os.dup(listener.fileno())
    if descriptor is None:
        return next(dist.rendezvous('env://', timeout=limit))[0]
    # multi_tenant: if this process opens env:// later, it gets this store.
    return dist.TCPStore(
        host,
        port,
        int(os.environ['WORLD_SIZE']),
        True,
        timeout=limit,
        multi_tenant=True,
        master_listen_fd=descriptor,
    )


def _meeting_name(environ: Mapping[str, str]) -> bytes:
    """Return the address of an abstract Unix socket, which depends on the secret of the job."""
    job = '\0'.join([str(os.getuid()), *(environ.get(name, '') for name in _IDENTITY)])
    digest = hmac.new(job_secret(environ), job.encode('utf-8', 'surrogateescape'), hashlib.sha256)
    return f'\0mapsage-store-{digest.hexdigest()[:32]}'.encode()


def _open_store(name: bytes, timeout: float) -> _Location:
    """Make the store, return its location, and answer every other rank once on a thread."""
    peers = int(os.environ['WORLD_SIZE']) + int(os.environ.get(ENCODERS_VARIABLE, '0')) - 1
    location: _Location
    try:
        location = private_file()
    except OSError as error:
        store, warning = loopback_store(error, timedelta(seconds=timeout))
        sys.stderr.write(f'{warning}\n')
        sys.stderr.flush()
        _kept_stores.append(store)
        location = str(store.port)
    if peers > 0:
        listener = _listen(name, time.monotonic() + timeout)
        threading.Thread(
            target=_answer_ranks,
            args=(listener, location, peers),
            daemon=True,
            name='mapsage job store',
        ).start()
    return location


def _listen(name: bytes, deadline: float) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while True:
        try:
            listener.bind(name)
            listener.listen(1024)
            return listener
        # The name is taken, usually because an earlier run of the same job is still ending.
        except OSError as error:
            _check_holder(name)
            if time.monotonic() > deadline:
                listener.close()
                raise PrivateStoreError(
                    f'another job of this user has the same MASTER_PORT='
                    f'{os.environ.get("MASTER_PORT")} and still waits for its ranks ({error}). '
                    f'End it, or choose another port.'
                ) from error
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


def _answer_ranks(listener: socket.socket, location: _Location, peers: int) -> None:
    """Send the location to every other rank, then close the listener."""
    answered: Set[int] = set()
    with listener:
        # A rank that asks twice belongs to the next run of the job. It must wait for its rank 0.
        while len(answered) < peers:
            connection, _ = listener.accept()
            with connection:
                try:
                    if _user_of(connection) != os.geteuid():
                        continue
                    connection.settimeout(_ANSWER_SECONDS)
                    (rank,) = _RANK.unpack(connection.recv(_RANK.size))
                    _send_location(connection, _AGAIN if rank in answered else location)
                    answered.add(rank)
                # The rank has ended.
                except (OSError, struct.error):
                    continue


def _send_location(connection: socket.socket, location: _Location) -> None:
    if isinstance(location, int):
        connection.sendmsg(
            [_MESSAGE.pack(_FILE.encode(), 0)],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [location]))],
        )
    elif location == _AGAIN:
        connection.sendmsg([_MESSAGE.pack(_AGAIN.encode(), 0)])
    else:
        connection.sendmsg([_MESSAGE.pack(_PORT.encode(), int(location))])


def _request_location(name: bytes, timeout: float) -> _Location:
    """Return the location of the store, which rank 0 knows."""
    deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
    while True:
        try:
            location = _ask_once(name)
            if location is not None:
                return location
            problem = 'it belongs to an earlier run'
        except OSError as error:
            problem = str(error)
        if time.monotonic() > deadline:
            raise PrivateStoreError(
                f'rank {os.environ["RANK"]} did not reach rank 0 of its job on this machine within '
                f'{timeout:g} s ({problem}). It did not start, was stopped, or has ended: look at '
                f'the last lines in its log. All ranks need the same MASTER_ADDR, MASTER_PORT and '
                f'MAPSAGE_SECRET.',
                [0],
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _ask_once(name: bytes) -> Optional[_Location]:
    """Ask rank 0 for the location; None if it belongs to an earlier run of the job.

    Raises:
        OSError: If rank 0 does not listen yet, or does not answer.
        PrivateStoreError: If another user listens in its place.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        connection.connect(name)
        if _user_of(connection) != os.geteuid():
            raise PrivateStoreError(_OTHER_USER)
        connection.send(_RANK.pack(int(os.environ['RANK'])))
        descriptors = array.array('i')
        data, ancillary, _, _ = connection.recvmsg(
            _MESSAGE.size, socket.CMSG_SPACE(descriptors.itemsize)
        )
    if not data:
        raise ConnectionResetError('it closed the connection')
    kind, port = _MESSAGE.unpack(data)
    for _, _, content in ancillary:
        descriptors.frombytes(content[: descriptors.itemsize])
    kind = kind.rstrip(b'\0').decode()
    if kind == _FILE:
        os.set_inheritable(descriptors[0], False)
        return descriptors[0]
    return None if kind == _AGAIN else str(port)


def _user_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket, from the kernel."""
    facts = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(facts)[1])
