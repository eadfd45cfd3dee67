"""Keep the rendezvous store of elastic jobs: the place where their machines meet.

    python tools/rendezvous.py [--port 29400]

Run it on a machine that stays: a login node, or the batch script's own. It uses hardly any time or
memory. Training goes on if it ends, but lost machines cannot be replaced until it is started again
at the same address. It prints the line that starts the training on each machine. Port 0 is a free
port. SIGTERM or Ctrl-C end it.

It is for a trusted network only: the store has no password, and torch keeps a pickle in it, so that
whoever reaches the port can run code on the machines.
"""
import argparse
import importlib.util
import signal
import socket
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # of the checkout; in a wheel mapsage/.mim
PACKAGE = ROOT / 'mapsage' if (ROOT / 'mapsage').is_dir() else ROOT.parent
ELASTIC = PACKAGE / 'distributed/nodes/elastic.py'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--port', type=int, default=29400)
    parser.add_argument('--host', default=socket.gethostname(),
                        help='name or address under which the machines reach this one')
    args = parser.parse_args()
    from torch.distributed import TCPStore
    spec = importlib.util.spec_from_file_location('elastic', ELASTIC)
    elastic = importlib.util.module_from_spec(spec)
    sys.modules['elastic'] = elastic  # for its dataclass
    spec.loader.exec_module(elastic)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        store = TCPStore('localhost', args.port, is_master=True, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        sys.exit(f'error: no store can listen on port {args.port} of this machine: '
                 f'{str(error).splitlines()[0]}. Choose another with --port.')
    print(f'rendezvous store at {args.host}:{store.port}. On each machine, with as many as may '
          f'take part:\n\n  NNODES=2:4 RENDEZVOUS={args.host}:{store.port} bash '
          f'scripts/start_8card_training.sh CONFIG\n', flush=True)
    while True:
        elastic.tell_clock(store)


if __name__ == '__main__':
    main()
