"""Starts the ranks of a training with torchrun; if ranks fail, the last lines name the cause.

    python tools/launch.py [options of torchrun] tools/train.py CONFIG [options of tools/train.py]

`scripts/start_8card_training.sh` calls it. This process imports neither mapsage nor MMSegmentation,
so it reports mistakes in the arguments at once. It starts the fork server first, whose imports and
the import of torchrun then run side by side (`ranks/rank_start.py`).

The environment variables MAPSAGE_FIRST and MAPSAGE_THEN name a Python program each, one argument a
line: it runs before the ranks start, or after all ranks have ended successfully. Where ranks are
forks, it is one, too.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, List, Optional

from mapsage_launcher import schedulers, shipped, stop_request
from mapsage_launcher.addresses import wait_explained
from mapsage_launcher.drivers import no_plugins_loaded
from mapsage_launcher.extras import missing_extra
from mapsage_launcher.ranks.failure_report import describe_failure
from mapsage_launcher.ranks.leftover_encoders import EncoderWatch
from mapsage_launcher.ranks.rank_count import RankCount, RankCountError
from mapsage_launcher.ranks.rank_start import RankStart
from mapsage_launcher.trust import job_secret, private_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousInfo

# Stores that must live as long as the job.
_stores: List[TCPStore] = []


def run() -> None:
    """Start the ranks of the command line, wait for them, and exit with their status."""
    machines = _read_machines()
    ranks = RankStart(sys.argv[1:])
    count = RankCount(sys.argv[1:], shipped.SHIPPED / 'tools' / 'count_cards.py', ranks.driver)
    with no_plugins_loaded():
        from torch.distributed import run as torchrun
    args = torchrun.parse_args(sys.argv[1:])
    _check_config(args)
    try:
        count_line = count.apply(args)
    except RankCountError as error:
        sys.exit(f'error: {error}')
    _check_rank_count(torchrun, args.nproc_per_node)
    if count_line:
        print(count_line, flush=True)
    if machines is not None:
        _apply_machines(machines, args)
    _arrange_meeting(args)
    _run_program('MAPSAGE_FIRST', ranks)
    notes = private_folder()
    os.environ['MAPSAGE_ERROR_NOTES'] = notes.name
    run_job = _prepare_job(torchrun, args, Path(notes.name))
    print(ranks.apply(args), flush=True)
    watch = EncoderWatch(Path(notes.name), torchrun.determine_local_world_size(args.nproc_per_node))
    try:
        _run_or_exit(run_job, args, watch, Path(notes.name))
    finally:
        watch.stop()
        if 'MAPSAGE_THEN' not in os.environ:
            ranks.stop()
    has_left = stop_request.has_left(Path(notes.name))
    notes.cleanup()
    if has_left:
        print(
            'all ranks have left, as they were asked to; the same command with --resume '
            'continues the training',
            flush=True,
        )
        sys.exit(stop_request.STATUS)
    # torchrun's handlers would report a stop of the program as that of the ranks.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    os.environ.pop('MAPSAGE_ERROR_NOTES')
    _run_program('MAPSAGE_THEN', ranks)


def _read_machines() -> Optional[schedulers.Machines]:
    """Return the machines of the job; None if the command line says where they meet."""
    if schedulers.has_meeting_options(sys.argv[1:]):
        return None
    try:
        machines = schedulers.read_machines(os.environ)
    except schedulers.SchedulerError as error:
        sys.exit(f'error: {error}')
    # The pods of a PyTorchJob have them. What this launcher starts gets its own, or is one process.
    for name in ('RANK', 'WORLD_SIZE'):
        os.environ.pop(name, None)
    return machines


def _apply_machines(machines: schedulers.Machines, args: argparse.Namespace) -> None:
    """Change torchrun's parsed arguments, and what this machine does besides, for the machines."""
    line = schedulers.apply(machines, args)
    if line:
        print(line, flush=True)
    is_elastic = ':' in machines.nodes
    if is_elastic and Path(args.training_script).name == 'train.py':
        # The user's own --resume comes later, so it wins.
        args.training_script_args.insert(1, '--resume')
    if is_elastic or machines.rank != '0':
        # The map of the demo is made once, on machine 0.
        os.environ.pop('MAPSAGE_THEN', None)


def _check_config(args: argparse.Namespace) -> None:
    """Exit if the command line of the program begins with a config that does not exist."""
    config = args.training_script_args[0] if args.training_script_args else ''
    if config and not config.startswith('-') and not os.path.isfile(config):
        try:
            shipped.find_config(config)
        except shipped.ShippedError as error:
            sys.exit(f'error: {error}')


def _run_program(variable: str, ranks: RankStart) -> None:
    """Run the program that a variable names, if it is set; exit with its status if it fails."""
    program = os.environ.pop(variable, '')
    if not program:
        return
    try:
        status = subprocess.call(ranks.program_command(program.split('\n')))
    except KeyboardInterrupt:
        status = -signal.SIGINT
    if status:
        # A program that a signal has ended has the status of a shell.
        sys.exit(status if status > 0 else 128 - status)


def _arrange_meeting(args: argparse.Namespace) -> None:
    """Change torchrun's parsed arguments so that the ranks of one or several machines can meet."""
    # '1:1' is torchrun's default.
    if args.standalone or args.nnodes in ('1', '1:1'):
        keep_on_this_machine(args)
        return
    missing = missing_extra('names', 'NNODES=MIN:MAX')
    if ':' in args.nnodes and missing:
        sys.exit(f'error: NNODES={args.nnodes}: {missing}')
    try:
        print(job_secret.describe_secret(os.environ), flush=True)
    except job_secret.SecretError as error:
        sys.exit(f'error: {error}')
    if args.rdzv_backend == 'static' and args.node_rank == 0:
        check_port_free(args.master_port)


def _check_rank_count(torchrun: Any, text: str) -> None:
    """End with an error if torchrun cannot start so many ranks, which a scheduler may have said."""
    problem = 'expected 1 or more'
    try:
        if torchrun.determine_local_world_size(text) > 0:
            return
    # Also a kind of device that is not there.
    except ValueError as error:
        problem = str(error)
    sys.exit(
        f'error: NPROC_PER_NODE (or PET_NPROC_PER_NODE) is {text!r}: {problem}. Set a number of '
        f'ranks, or auto for one on each card.'
    )


def _prepare_job(
    torchrun: Any, args: argparse.Namespace, notes: Path
) -> Callable[[argparse.Namespace], None]:
    """Prepare signals and, for an elastic job, its settings; return the function that runs the job.

    Args:
        torchrun: The module ``torch.distributed.run``.
        args: Its parsed arguments.
        notes: Folder of the launcher's notes.
    """
    from torch.distributed.elastic.multiprocessing import api as processes

    is_elastic = ':' in args.nnodes and args.nnodes != '1:1'
    stop_request.take_requests(processes, notes, nodes_leave=is_elastic)
    if not is_elastic:
        if args.rdzv_backend == 'static':
            _explain_meeting()
        return torchrun.run
    from mapsage_launcher.nodes import elastic, elastic_agent

    try:
        settings = elastic.read_settings(
            args.nnodes, os.environ, elastic.job_name(args.training_script_args)
        )
        elastic.wait_for_store(settings)
        elastic.check_clock(settings)
        print(
            elastic.apply(settings, args, torchrun.determine_local_world_size(args.nproc_per_node)),
            flush=True,
        )
    except elastic.ElasticError as error:
        sys.exit(f'error: {error}')

    def run_elastic(args: argparse.Namespace) -> None:
        try:
            elastic_agent.run(torchrun, args, settings, notes)
        except elastic.ElasticError as error:
            sys.exit(f'error: {error}')

    return run_elastic


def _explain_meeting() -> None:
    """Let the wait of torchrun's launchers for each other be explained if it takes long."""
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    meet = StaticTCPRendezvous.next_rendezvous

    def meet_explained(meeting: StaticTCPRendezvous) -> RendezvousInfo:
        with wait_explained(
            meeting.master_addr,
            meeting.master_port,
            meeting.rank == 0,
            meeting.timeout.total_seconds(),
        ):
            return meet(meeting)

    StaticTCPRendezvous.next_rendezvous = meet_explained  # type: ignore[method-assign,assignment]


def _run_or_exit(
    run_job: Callable[[argparse.Namespace], None],
    args: argparse.Namespace,
    watch: EncoderWatch,
    notes: Path,
) -> None:
    """Run the job; if it fails or is stopped, print why and exit with a status above 0."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run_job(args)
    except ChildFailedError as failed:
        # An encoder that the watch has ended does not count as failed.
        if not watch.ended:
            print(describe_failure(failed, notes), file=sys.stderr, flush=True)
            # The exit code is negative if the rank was killed by a signal.
            sys.exit(max(1, failed.get_first_failure()[1].exitcode))
    except SignalException as stopped:
        print(f'\nstopped by {stopped.sigval.name}; all ranks are ended', file=sys.stderr)
        sys.exit(128 + stopped.sigval.value)


def check_port_free(port: int) -> None:
    """Exit if ``port`` is in use on this machine; otherwise ranks would wait for each other."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Torch's store listens with this option, so a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(('', port))
        except OSError as error:
            sys.exit(
                f'error: MASTER_PORT={port} is in use on this machine ({error}). Choose '
                f'another, or leave MASTER_PORT unset on one node to get a free one.'
            )


def private_folder() -> 'tempfile.TemporaryDirectory[str]':
    """Return a folder for the notes of the ranks; exit if other users could write there.

    Another user's file there could stop the job, or pass for the error of a rank.
    """
    folder = tempfile.TemporaryDirectory(prefix='mapsage-errors-')
    facts = os.stat(folder.name)
    if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        mode = stat.S_IMODE(facts.st_mode)
        folder.cleanup()
        sys.exit(
            f'error: {folder.name} was made with mode {mode:04o} for user {facts.st_uid}: '
            f'expected a folder with mode 0700 for user {os.getuid()}, since the ranks leave '
            f'notes there. Set TMPDIR to a folder on a local disk.'
        )
    return folder


def keep_on_this_machine(args: argparse.Namespace) -> None:
    """Change torchrun's parsed arguments so that a job on one machine opens no port.

    The arguments concern torchrun's rendezvous store only. The ranks have another store, see
    mapsage/distributed/job_store.py.
    """
    try:
        # Kept open until this process ends.
        args.rdzv_endpoint = private_store.file_path(private_store.private_file())
        # Torch would append a sign of life to the file every 5 s.
        conf = 'store_type=file,keep_alive_interval=86400'
    except OSError as error:
        try:
            store, warning = private_store.loopback_store(error, timedelta(seconds=60))
        except private_store.PrivateStoreError as impossible:
            sys.exit(f'error: {impossible}')
        _stores.append(store)
        print(warning, file=sys.stderr, flush=True)
        args.rdzv_endpoint, conf = f'127.0.0.1:{store.port}', 'is_host=0'
    args.rdzv_backend, args.rdzv_conf, args.standalone = 'c10d', conf, False
    # Distinguishes this job from other jobs of the same user.
    args.rdzv_id = os.urandom(16).hex()
    if hasattr(args, 'local_addr'):
        args.local_addr = '127.0.0.1'
    # Otherwise torch opens a store for the ranks, which listens on all interfaces.
    os.environ['TORCH_DISABLE_SHARE_RDZV_TCP_STORE'] = '1'
    if job_secret.SECRET_FILE_VARIABLE not in os.environ:
        os.environ.setdefault(job_secret.SECRET_VARIABLE, job_secret.new_secret())
