"""Start the ranks of a training with torchrun; if ranks fail, print the first one's error last.

    python tools/launch.py [options of torchrun] tools/train.py CONFIG [options of tools/train.py]

scripts/start_8card_training.sh calls it. If the environment variable MAPSAGE_THEN is set, the
process becomes that command once all ranks have ended successfully. This file imports neither
mapsage nor MMSegmentation, so that errors in the arguments are reported at once.
"""
import importlib.util
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

# Loaded by its path, since importing mapsage takes seconds.
RANK_START = Path(__file__).resolve().parents[1] / 'mapsage' / 'engine' / 'rank_start.py'


def prepare_ranks() -> Any:
    """Return the ``RankStart`` of this launch."""
    spec = importlib.util.spec_from_file_location('rank_start', RANK_START)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.RankStart(sys.argv[1:])


def check_port_free(port: int) -> None:
    """Exit if ``port`` is in use on this machine; otherwise ranks would wait for each other."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # torch's store listens with this option, so that a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(('', port))
        except OSError as error:
            sys.exit(f'error: MASTER_PORT={port} is in use on this machine ({error}). Choose '
                     f'another, or leave MASTER_PORT unset on one node to get a free one.')


def report(failed, notes: Path) -> str:
    """Return which rank failed first, with its own error.

    If a rank was killed, this is the cause of the other ranks' errors. SIGTERM does not count,
    since torchrun itself ends the other ranks with it. If no rank was killed, the earliest note
    decides: torchrun may notice the end of a rank that has lost its peer before that of the peer.

    Args:
        failed: ``ChildFailedError`` of torchrun.
        notes: Folder of files with the ranks' errors, named after time and rank.
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
            message += '. If nobody has sent it, the machine ran out of memory: see `dmesg`.'
    else:
        rank, message = written[0].name.split('-')[1], written[0].read_text(encoding='utf-8')
    return f'\nerror: rank {rank} failed first:\n{message}'


def main() -> None:
    ranks = prepare_ranks()
    # These imports come later, so that they run at the same time as those of the fork server.
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
        # The exit code is negative if the rank was killed by a signal.
        sys.exit(max(1, failed.get_first_failure()[1].exitcode))
    except SignalException as stopped:
        print(f'\nstopped by {stopped.sigval.name}; all ranks are ended', file=sys.stderr)
        sys.exit(128 + stopped.sigval.value)
    finally:
        ranks.stop()
    notes.cleanup()
    # The script that called this sets the variable. The command replaces this process, so that it
    # gets the signals that are sent to it.
    if 'MAPSAGE_THEN' in os.environ:
        sys.stdout.flush()
        del os.environ['MAPSAGE_ERROR_NOTES']
        os.execvp('bash', ['bash', '-c', os.environ.pop('MAPSAGE_THEN')])


if __name__ == '__main__':
    main()
