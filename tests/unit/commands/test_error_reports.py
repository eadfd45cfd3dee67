"""Whatever the error and wherever its report goes, the report does not fail."""

from __future__ import annotations

import atexit
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Tuple

import pytest
import torch
import torch.distributed as dist
from ranks import free_port
from support import ROOT, UNDECODABLE

from mapsage.commands import cli
from mapsage.distributed import RankError, RankLostError, WeightsDifferError
from mapsage.engine.env_cfg import ConfigError
from mapsage.extras.labels.fixmatch import SemiSupervisedError
from mapsage.extras.mask_transformers.annealing_hook import AnnealingError
from mapsage.geo import GeoError

FILE = UNDECODABLE + '.tif'


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError('no message today')


class MuteUserError(ConfigError):
    __str__ = Mute.__str__  # type: ignore[assignment]


def run_in_fork(
    main: Callable[[Any], Any], folder: Path, error_output: str = '', **environ: str
) -> Tuple[int, str]:
    """Let a fork run ``main`` as an entry point, on a console in ASCII.

    Returns:
        Exit status, and what it has written.
    """
    output = folder / 'output.txt'
    pid = os.fork()
    if not pid:
        try:
            os.environ.update(environ)
            file = os.open(str(output), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            errors = os.open(error_output, os.O_WRONLY) if error_output else file
            sys.stdout = io.TextIOWrapper(
                io.FileIO(file, 'w', closefd=False), encoding='ascii', write_through=True
            )
            sys.stderr = io.TextIOWrapper(
                io.FileIO(errors, 'w', closefd=False), encoding='ascii', write_through=True
            )
            atexit._clear()
            atexit.register(print, 'the interpreter ended by itself')
            cli.run(main)
        except SystemExit as end:
            atexit._run_exitfuncs()
            os._exit(int(end.code or 0))
        finally:
            os._exit(99)
    _, status = os.waitpid(pid, 0)
    return os.WEXITSTATUS(status), output.read_text()


@pytest.mark.parametrize(
    'error, words',
    [
        (OSError(f'cannot read {FILE}'), r'cannot read \udcb5\udcd8.tif'),
        (ConfigError('影像.tif'), r'ConfigError: \u5f71\u50cf.tif'),
        (ConfigError('a\0b'), r'ConfigError: a\x00b'),
        (Mute(), 'Mute: '),
        (MuteUserError(), 'MuteUserError without a readable message'),
    ],
)
def test_any_error_is_shown_and_noted(error: Exception, words: str, tmp_path: Path) -> None:
    def main(_: Any) -> None:
        print('scene 影像', FILE)
        raise error

    (tmp_path / 'notes').mkdir()
    status, output = run_in_fork(main, tmp_path, MAPSAGE_ERROR_NOTES=str(tmp_path / 'notes'))
    assert status == 1 and words in output
    assert r'scene \u5f71\u50cf \udcb5\udcd8.tif' in output
    (note,) = (tmp_path / 'notes').glob('*-*')
    assert note.read_text(encoding='utf-8').startswith(type(error).__name__)


@pytest.mark.parametrize(
    'error, final',
    [
        (SemiSupervisedError('FixMatchHook: the cause'), True),
        (AnnealingError('the cause'), True),
        (RankError(1, 'the cause', 'saving'), False),
        (RankLostError('rank 1 is lost', [1]), False),
        (WeightsDifferError('the weights differ'), False),
    ],
)
def test_a_user_error_is_one_sentence_and_ends_an_elastic_job_if_it_is_final(
    error: Exception, final: bool, tmp_path: Path
) -> None:
    def main(_: Any) -> None:
        raise error

    (tmp_path / 'notes').mkdir()
    status, output = run_in_fork(main, tmp_path, MAPSAGE_ERROR_NOTES=str(tmp_path / 'notes'))
    assert status == 1 and output.startswith(f'{type(error).__name__}: {error}\n')
    assert 'Traceback' not in output
    assert (tmp_path / 'notes' / 'final').exists() == final


class FailingDataset(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> None:
        raise GeoError('scene.tif has no bands. Expected three.')


def test_an_error_of_a_loader_worker_is_shown_without_the_traceback_of_torch(
    tmp_path: Path,
) -> None:
    def main(_: Any) -> None:
        next(iter(torch.utils.data.DataLoader(FailingDataset(), num_workers=1)))

    assert run_in_fork(main, tmp_path) == (
        1,
        'GeoError: scene.tif has no bands. Expected three.\nthe interpreter ended by itself\n',
    )


def test_the_folder_of_notes_may_be_gone(tmp_path: Path) -> None:
    def main(_: Any) -> None:
        raise ConfigError('the cause')

    status, output = run_in_fork(main, tmp_path, MAPSAGE_ERROR_NOTES=str(tmp_path / 'gone'))
    assert (status, output) == (1, 'ConfigError: the cause\nthe interpreter ended by itself\n')


@pytest.mark.parametrize('error', [ConfigError('the cause'), KeyError('the cause')])
def test_stderr_may_be_full(error: Exception, tmp_path: Path) -> None:
    def main(_: Any) -> None:
        raise error

    status, _ = run_in_fork(main, tmp_path, '/dev/full')
    assert status == 1


@pytest.mark.parametrize(
    'error, expected', [(KeyboardInterrupt(), 130), (ConfigError('the cause'), 1)]
)
def test_a_rank_that_is_stopped_leaves_its_process_group_alone(
    error: BaseException, expected: int, tmp_path: Path
) -> None:
    def main(_: Any) -> None:
        dist.init_process_group(
            'gloo', init_method=f'tcp://127.0.0.1:{free_port()}', rank=0, world_size=1
        )
        raise error

    status, output = run_in_fork(main, tmp_path)
    assert status == expected and 'ended by itself' not in output


LOGGING = """
import sys
from mapsage.engine.runner import MapSageRunner
runner = MapSageRunner.__new__(MapSageRunner)
runner._log_dir, runner._timestamp, runner._experiment_name = sys.argv[1], 'run', 'run'
runner.build_logger().error('cannot read \\u5f71\\u50cf \\udcb5\\udcd8.tif')
"""


@pytest.mark.long
def test_a_log_in_an_ascii_locale_takes_any_text(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, '-c', LOGGING, str(tmp_path)],
        universal_newlines=True,
        cwd=str(ROOT),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        timeout=120,
        env={
            **os.environ,
            'LC_ALL': 'C',
            'PYTHONUTF8': '0',
            'PYTHONCOERCECLOCALE': '0',
            'PYTHONIOENCODING': 'ascii',
        },
    )
    assert done.returncode == 0 and 'Logging error' not in done.stderr, done.stderr
    assert r'cannot read \u5f71\u50cf \udcb5\udcd8.tif' in done.stdout
    text = (tmp_path / 'run.log').read_text(encoding='utf-8')
    assert r'cannot read 影像 \udcb5\udcd8.tif' in text
