"""Start the ranks of a training with torchrun, and end with the first failing rank's own error.

    python tools/launch.py [options of torchrun] tools/train.py CONFIG [options of tools/train.py]

Called by scripts/start_8card_training.sh. Once all ranks have ended well it becomes the command in
MAPSAGE_THEN, if there is one. Imports neither mapsage nor MMSegmentation, so that what can be
refused is refused at once.
"""
import importlib.util
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

# By its path: importing mapsage takes seconds.
RANK_START = Path(__file__).resolve().parents[1] / 'mapsage' / 'engine' / 'rank_start.py'


def prepare_ranks() -> Any:
    """Return the ``RankStart`` of this launch."""
    spec = importlib.util.spec_from_file_location('rank_start', RANK_START)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.RankStart(sys.argv[1:])


def check_port_free(port: int) -> None:
    """Exit when this machine's ``port`` is taken: ranks would wait for each other instead."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As torch's own store listens, so that a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(('', port))
        except OSError as error:
            sys.exit(f'error: MASTER_PORT={port} is in use on this machine ({error}). Choose '
                     f'another, or leave MASTER_PORT unset on one node to get a free one.')


def report(failed, notes: Path) -> str:
    """Return which rank of a ``ChildFailedError`` failed first, with its own words.

    A rank that was killed is the cause of what the others then report, unless it was by SIGTERM,
    with which torchrun itself ends the others. Otherwise the earliest note counts: torchrun may
    see a rank end that has only lost its peer before it sees that peer end.
    """
    killed = [rank for rank, failure in failed.failures.items()
              if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM]
    written = sorted(notes.iterdir())  # named after time and rank
    if killed or not written:
        rank = killed[0] if killed else failed.get_first_failure()[0]
        failure = failed.failures[rank]
        by = failure.signal_name() if failure.exitcode < 0 else ''
        message = f'killed by {by}' if by else str(failure.message)
        if by == 'SIGKILL':
            message += '. If nobody sent it, the machine ran out of memory: see `dmesg`.'
    else:
        rank, message = written[0].name.split('-')[1], written[0].read_text()
    return f'\nerror: rank {rank} failed first:\n{message}'


def main() -> None:
    ranks = prepare_ranks()
    # After it, since what ranks are forked from imports torch as well, at the same time.
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    args = torchrun.parse_args(sys.argv[1:])
    # `tools/train.py CONFIG ...`
    config = args.training_script_args[0] if args.training_script_args else ''
    if config and not config.startswith('-') and not os.path.isfile(config):
        sys.exit(f'error: config file {config} does not exist. Shipped ones are under configs/.')
    if args.rdzv_backend == 'static' and args.node_rank == 0:
        check_port_free(args.master_port)
    notes = tempfile.TemporaryDirectory(prefix='mapsage-errors-')
    os.environ['MAPSAGE_ERROR_NOTES'] = notes.name
    print(ranks.apply(args), flush=True)
    try:
        torchrun.run(args)
    except ChildFailedError as failed:
        print(report(failed, Path(notes.name)), file=sys.stderr, flush=True)
        sys.exit(max(1, failed.get_first_failure()[1].exitcode))  # negative: killed by a signal
    except SignalException as stopped:
        print(f'\nstopped by {stopped.sigval.name}; all ranks are ended', file=sys.stderr)
        sys.exit(128 + stopped.sigval.value)
    finally:
        ranks.stop()
    notes.cleanup()
    if 'MAPSAGE_THEN' in os.environ:  # of the script that called; as this process, for its signals
        sys.stdout.flush()
        del os.environ['MAPSAGE_ERROR_NOTES']
        os.execvp('bash', ['bash', '-c', os.environ.pop('MAPSAGE_THEN')])


if __name__ == '__main__':
    main()
