"""tools/launch.py lets the ranks of a machine meet in private."""

from __future__ import annotations

import argparse
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from socket_table import listening
from support import ROOT, on_host
from warm_python import warm_python

from mapsage_launcher import launch
from mapsage_launcher.ranks.rank_start import RankStart


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is as before, after the test."""
    for name in ('MAPSAGE_SECRET', 'MAPSAGE_SECRET_FILE', 'TORCH_DISABLE_SHARE_RDZV_TCP_STORE'):
        monkeypatch.setenv(name, '')
        monkeypatch.delenv(name)


def options() -> argparse.Namespace:
    return argparse.Namespace(
        standalone=True,
        rdzv_backend='static',
        rdzv_endpoint='',
        rdzv_id='',
        rdzv_conf='',
        local_addr=None,
    )


def test_torchrun_meets_in_a_file_without_a_name(here: None) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

    args, other = options(), options()
    launch.keep_on_this_machine(args)
    launch.keep_on_this_machine(other)
    assert args.rdzv_id != other.rdzv_id and not args.standalone
    assert 'memfd' in os.readlink(args.rdzv_endpoint)
    before = listening([os.getpid()])
    conf = dict(pair.split('=') for pair in args.rdzv_conf.split(','))
    backend, store = create_backend(
        RendezvousParameters(args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id, 1, 1, **conf)
    )
    assert type(store).__name__ == 'FileStore' and listening([os.getpid()]) == before
    assert backend.set_state(b'state')[2] and backend.get_state()[0] == b'state'


def test_each_job_of_one_machine_has_a_secret(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launch.keep_on_this_machine(options())
    made = os.environ.pop('MAPSAGE_SECRET')
    launch.keep_on_this_machine(options())
    assert len(made) == 64 and os.environ['MAPSAGE_SECRET'] != made
    monkeypatch.setenv('MAPSAGE_SECRET', 'of the user ' * 4)
    launch.keep_on_this_machine(options())
    assert os.environ['MAPSAGE_SECRET'] == 'of the user ' * 4
    monkeypatch.delenv('MAPSAGE_SECRET')
    monkeypatch.setenv('MAPSAGE_SECRET_FILE', '/home/me/secret')
    launch.keep_on_this_machine(options())
    assert 'MAPSAGE_SECRET' not in os.environ


@pytest.mark.parametrize('text', ['two', '0', '-1', '2.5', ''])
def test_a_number_of_ranks_that_is_none(text: str) -> None:
    from torch.distributed import run

    launch._check_rank_count(run, '2')
    with pytest.raises(
        SystemExit, match=f"NPROC_PER_NODE .* is '{text}': .* Set a number of ranks"
    ):
        launch._check_rank_count(run, text)


def test_a_program_of_the_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv('PYTHON_EXEC', 'python')
    ranks = RankStart([])
    # No program, no effect.
    launch._run_program('MAPSAGE_FIRST', ranks)
    program = tmp_path / 'a program.py'
    program.write_text(
        'import os, signal, sys\nassert "MAPSAGE_FIRST" not in os.environ\n'
        'if sys.argv[2] == "dies":\n    os.kill(os.getpid(), signal.SIGTERM)\n'
        'sys.exit(int(sys.argv[1]))\n'
    )
    for argument, status in (('3', 3), ('dies', 128 + signal.SIGTERM)):
        monkeypatch.setenv('MAPSAGE_FIRST', f'{program}\n3\n{argument}')
        with pytest.raises(SystemExit) as error:
            launch._run_program('MAPSAGE_FIRST', ranks)
        assert error.value.code == status
    monkeypatch.setenv('MAPSAGE_FIRST', f"{program}\n0\n$(a 'b")
    launch._run_program('MAPSAGE_FIRST', ranks)
    assert 'MAPSAGE_FIRST' not in os.environ


@on_host
def test_a_program_of_the_launcher_is_a_fork(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    warm_python()
    monkeypatch.delenv('PYTHON_EXEC', raising=False)
    program = tmp_path / 'a program.py'
    program.write_text(
        'import sys\nheavy = "mmseg.models" in sys.modules\n'
        f'with open({str(tmp_path / "seen")!r}, "w") as seen:\n'
        '    seen.write(f"{heavy} {sys.argv[1:]}")'
    )
    monkeypatch.setenv('MAPSAGE_FIRST', f'{program}\na b')
    launch._run_program('MAPSAGE_FIRST', RankStart([]))
    assert (tmp_path / 'seen').read_text() == "True ['a b']"


def test_a_folder_for_notes_that_others_could_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    with launch.private_folder() as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    make = tempfile.mkdtemp

    def on_a_file_system_without_modes(*arguments: Any, **named: Any) -> str:
        folder = make(*arguments, **named)
        os.chmod(folder, 0o777)
        return folder

    monkeypatch.setattr(tempfile, 'mkdtemp', on_a_file_system_without_modes)
    with pytest.raises(SystemExit) as error:
        launch.private_folder()
    assert 'mode 0777' in str(error.value) and 'Set TMPDIR' in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('node_rank', [0, 1])
def test_a_launcher_says_where_it_waits_for_the_others(node_rank: int) -> None:
    hasty = (
        'import sys; from mapsage_launcher import addresses, launch; '
        'addresses._PATIENCE_SECONDS = 0.2; launch.run()'
    )
    launcher = subprocess.Popen(
        [
            sys.executable,
            '-c',
            hasty,
            '--nnodes',
            '2',
            '--node_rank',
            str(node_rank),
            '--nproc_per_node',
            '1',
            '--master_addr',
            'no-host.invalid',
            '--master_port',
            '0',
            'tools/train.py',
        ],
        cwd=str(ROOT),
        env={**os.environ, 'MAPSAGE_SECRET': 'a1' * 32},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        start_new_session=True,
    )
    try:
        assert launcher.stdout
        # Without the warning, these lines end with torch's own error, after 900 s.
        assert any(
            line.startswith("warning: MASTER_ADDR='no-host.invalid' stands for no address")
            for line in launcher.stdout
        )
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()
