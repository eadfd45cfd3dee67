"""Runs the rendezvous store of elastic jobs, at which their machines meet.

    python tools/rendezvous.py [--port 29400]

Run it on a machine that stays, such as a login node; it uses hardly any time or memory. If it ends,
the training continues, but lost machines cannot be replaced until it is started again at the same
address. It prints the line that starts the training on each machine. Port 0 stands for a free port.
SIGTERM or Ctrl-C end it.

Use it only in a trusted network: the store has no password and torch keeps a pickle in it, so any
process that reaches the port can run code on the machines. The store listens only at the address of
--host if torch can do that (docs/explanation/security.md has a firewall rule).
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Tuple

from mapsage_launcher.addresses import own_address
from mapsage_launcher.nodes import elastic
from mapsage_launcher.trust.job_secret import SecretError, describe_secret

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def open_store(host: str, port: int) -> Tuple[TCPStore, str, str]:
    """Return the store, the host by which to reach it, and a warning if it listens everywhere.

    Raises:
        AddressError: If the other machines could not reach this one at ``host``.
        OSError, RuntimeError, ValueError: If the store cannot listen there.
    """
    from torch.distributed import TCPStore

    address = own_address(host)
    if 'master_listen_fd' not in (TCPStore.__init__.__doc__ or ''):
        store = TCPStore('localhost', port, is_master=True, wait_for_workers=False)
        return (
            store,
            host,
            ('warning: this version of torch listens on all interfaces of the machine.'),
        )
    family = socket.AF_INET6 if ':' in address else socket.AF_INET
    with socket.create_server((address, port), family=family, backlog=1024) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )
    # The address, because the name of a host may stand for 127.0.1.1 on itself.
    return store, address, ''


def run() -> None:
    """Run the store until a signal ends this process."""
    parser = argparse.ArgumentParser(
        description='Run the rendezvous store of elastic jobs, at which their machines meet.'
    )
    parser.add_argument('--port', type=int, default=elastic.DEFAULT_PORT)
    parser.add_argument(
        '--host',
        default=socket.gethostname(),
        help='name or address under which the machines reach this one',
    )
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        secret = describe_secret(os.environ)
        store, host, warning = open_store(args.host, args.port)
    except SecretError as error:
        sys.exit(f'error: {error}')
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(
            f'error: no store can listen at port {args.port} of {args.host}: '
            f'{str(error).splitlines()[0]}. Choose another with --port, or name an address of '
            f'this machine that the others reach with --host.'
        )
    host = f'[{host}]' if ':' in host else host
    print(
        f'rendezvous store at {host}:{store.port}. On each machine, with as many as may '
        f'take part:\n\n  NNODES=2:4 RENDEZVOUS={host}:{store.port} bash '
        f'scripts/start_8card_training.sh CONFIG\n\n{secret}',
        flush=True,
    )
    if warning:
        print(warning, flush=True)
    while True:
        elastic.tell_clock(store)
