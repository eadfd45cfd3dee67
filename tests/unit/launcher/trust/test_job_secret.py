"""Where the secret of a job comes from, and which ones are refused."""

import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support import ROOT

from mapsage_launcher.trust.job_secret import (
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    SecretError,
    describe_secret,
    job_secret,
    new_secret,
)

SECRET = 'a1' * 32


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder and a temporary folder in which nothing is yet."""
    (tmp_path / 'home').mkdir()
    (tmp_path / 'temporary').mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'temporary'))
    return tmp_path / 'home'


def private_file(path: Path, text: str, mode: int = 0o600) -> Path:
    """Write a file of a mode."""
    path.write_text(text)
    path.chmod(mode)
    return path


def refused(environ, *words: str) -> str:
    """Return the error's text, which has the words and never the secret."""
    with pytest.raises(SecretError) as error:
        job_secret(environ)
    text = str(error.value)
    assert all(word in text for word in words), text
    assert SECRET not in text
    return text


def test_new_secrets_are_64_digits_and_differ():
    secrets = {new_secret() for _ in range(50)}
    assert len(secrets) == 50 and {len(secret) for secret in secrets} == {64}
    assert all(int(secret, 16) >= 0 for secret in secrets)


def test_the_variable_comes_before_the_file_and_this_before_the_users(home, tmp_path):
    file = private_file(tmp_path / 'file', 'b2' * 32 + '\n')
    both = {SECRET_VARIABLE: SECRET, SECRET_FILE_VARIABLE: str(file), 'HOME': str(home)}
    assert job_secret(both) == SECRET.encode()
    del both[SECRET_VARIABLE]
    assert job_secret(both) == b'b2' * 32
    assert not any(home.iterdir())


@pytest.mark.parametrize('value', ['', ' \n', 'a' * 31, ' ' * 32 + 'a' * 31])
def test_a_variable_without_a_secret_is_refused(value):
    refused({SECRET_VARIABLE: value}, SECRET_VARIABLE, 'at least 32', 'os.urandom')


def test_a_missing_file_and_an_empty_one_are_refused(tmp_path):
    refused({SECRET_FILE_VARIABLE: str(tmp_path / 'none')}, 'none', 'No such file', 'umask 077')
    refused({SECRET_FILE_VARIABLE: ''}, SECRET_FILE_VARIABLE)
    refused(
        {SECRET_FILE_VARIABLE: str(private_file(tmp_path / 'empty', ''))}, 'empty', '0 characters'
    )
    refused({SECRET_FILE_VARIABLE: str(tmp_path)}, 'directory')
    refused({SECRET_FILE_VARIABLE: str(private_file(tmp_path / 'long', 'a' * 5000))}, '4096')


@pytest.mark.parametrize('mode', [0o640, 0o604, 0o620, 0o666, 0o777])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path, mode):
    file = private_file(tmp_path / 'open', SECRET, mode)
    refused({SECRET_FILE_VARIABLE: str(file)}, f'{mode:04o}', '0600', f'chmod 600 {file}')


@pytest.mark.skipif(os.getuid() != 0, reason='gives files to another user')
def test_a_file_and_a_folder_of_somebody_else_are_refused(home, tmp_path):
    file = private_file(tmp_path / 'foreign', SECRET)
    os.chown(str(file), 12345, -1)
    refused({SECRET_FILE_VARIABLE: str(file)}, 'belongs to user 12345')
    folder = home / '.config' / 'mapsage'
    folder.mkdir(parents=True, mode=0o700)
    os.chown(str(folder), 12345, -1)
    refused({'HOME': str(home)}, 'user 12345', str(folder))


# What kubelet makes: a tmpfs that the container gets read-only, files behind two symbolic links.
MOUNTED = """
import os, subprocess, sys
from mapsage_launcher.trust.job_secret import SecretError, job_secret
folder, mode, secret = sys.argv[1], int(sys.argv[2], 8), sys.argv[3]
subprocess.run(['mount', '-t', 'tmpfs', 'secret', folder], check=True)
os.makedirs(f'{folder}/..2026')
with open(f'{folder}/..2026/secret', 'w') as file:
    file.write(secret)
os.chown(f'{folder}/..2026/secret', 0, 2000)
os.chmod(f'{folder}/..2026/secret', mode)
os.symlink('..2026', f'{folder}/..data')
os.symlink('..data/secret', f'{folder}/secret')
subprocess.run(['mount', '-o', 'remount,ro', folder], check=True)
os.setgroups([2000])
os.setgid(1000)
os.setuid(1000)
try:
    print(job_secret({'MAPSAGE_SECRET_FILE': f'{folder}/secret'}).decode())
except SecretError as error:
    print(error)
"""


@pytest.mark.skipif(
    os.getuid() != 0 or subprocess.call(['unshare', '--mount', 'true']) != 0,
    reason='mounts a file system of its own',
)
@pytest.mark.parametrize(
    'mode, expected',
    [
        # defaultMode 0400 with an fsGroup
        (0o440, SECRET),
        (0o444, 'has mode 0444, .* set defaultMode: 0400'),
        (0o460, 'has mode 0460'),
    ],
)
def test_a_secret_that_kubernetes_mounts(mode, expected):
    with tempfile.TemporaryDirectory(dir='/tmp') as folder:
        os.chmod(folder, 0o755)
        done = subprocess.run(
            [
                *'unshare --mount'.split(),
                sys.executable,
                '-c',
                MOUNTED,
                folder,
                f'{mode:o}',
                SECRET,
            ],
            cwd=str(ROOT),
            stdout=subprocess.PIPE,
            universal_newlines=True,
            timeout=60,
            check=True,
        )
    assert re.match(f'.*{expected}', done.stdout)


def test_a_named_pipe_does_not_stop_the_process(tmp_path):
    os.mkfifo(str(tmp_path / 'pipe'), 0o600)
    refused({SECRET_FILE_VARIABLE: str(tmp_path / 'pipe')}, 'no regular file')


def test_the_users_file_is_private_and_stays_the_same(home):
    secret = job_secret({'HOME': str(home)})
    path = home / '.config' / 'mapsage' / 'secret'
    assert path.read_text().strip().encode() == secret and len(secret) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert job_secret({'HOME': str(home)}) == secret
    assert [entry.name for entry in path.parent.iterdir()] == ['secret']


def test_the_configuration_folder_may_be_elsewhere(home, tmp_path):
    environ = {'HOME': str(home), 'XDG_CONFIG_HOME': str(tmp_path / 'other')}
    job_secret(environ)
    assert (tmp_path / 'other' / 'mapsage' / 'secret').is_file()
    # A relative one is invalid and ignored, as the specification says.
    job_secret({'HOME': str(home), 'XDG_CONFIG_HOME': 'relative'})
    assert (home / '.config' / 'mapsage' / 'secret').is_file()


@pytest.mark.parametrize('mode', [0o755, 0o770, 0o701])
def test_a_folder_that_others_can_enter_is_refused(home, mode):
    job_secret({'HOME': str(home)})
    folder = home / '.config' / 'mapsage'
    folder.chmod(mode)
    refused({'HOME': str(home)}, f'{mode:04o}', f'chmod 700 {folder}')


def test_a_users_file_that_others_may_read_is_refused(home):
    job_secret({'HOME': str(home)})
    (home / '.config' / 'mapsage' / 'secret').chmod(0o644)
    refused({'HOME': str(home)}, '0644')


def test_without_a_home_the_file_is_in_a_private_temporary_folder(home, tmp_path):
    (tmp_path / 'file').touch()
    environ = {'HOME': str(tmp_path / 'file')}
    secret = job_secret(environ)
    folder = tmp_path / 'temporary' / f'mapsage-{os.getuid()}'
    assert (folder / 'secret').read_text().strip().encode() == secret == job_secret(environ)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_temporary_folder_that_is_a_link_is_refused(home, tmp_path):
    (tmp_path / 'file').touch()
    (tmp_path / 'elsewhere').mkdir(mode=0o700)
    (tmp_path / 'temporary' / f'mapsage-{os.getuid()}').symlink_to(tmp_path / 'elsewhere')
    refused({'HOME': str(tmp_path / 'file')}, 'no folder', SECRET_VARIABLE)
    assert not any((tmp_path / 'elsewhere').iterdir())


def test_no_folder_at_all_names_both_and_the_variable(home, tmp_path, monkeypatch):
    (tmp_path / 'file').touch()
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'file'))
    refused({'HOME': str(tmp_path / 'file')}, str(tmp_path / 'file'), SECRET_VARIABLE)


def test_many_processes_that_start_at_once_read_one_secret(home, tmp_path):
    program = (
        'import os, sys; sys.path.append(sys.argv[1])\n'
        'from mapsage_launcher.trust.job_secret import job_secret\n'
        'sys.stdin.read()\n'
        'print(job_secret(os.environ).decode())'
    )
    reader, writer = socket.socketpair()
    with reader, writer:
        processes = [
            subprocess.Popen(
                [sys.executable, '-I', '-S', '-c', program, str(ROOT)],
                stdin=reader.fileno(),
                stdout=subprocess.PIPE,
                env={'HOME': str(home)},
            )
            for _ in range(12)
        ]
        writer.close()  # all begin now
        secrets = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 12
    assert len(secrets) == 1
    assert [entry.name for entry in (home / '.config' / 'mapsage').iterdir()] == ['secret']


def test_where_a_secret_is_said_to_be(home, tmp_path):
    assert SECRET_VARIABLE in describe_secret({SECRET_VARIABLE: SECRET})
    file = private_file(tmp_path / 'file', SECRET)
    assert str(file) in describe_secret({SECRET_FILE_VARIABLE: str(file)})
    text = describe_secret({'HOME': str(home)})
    assert str(home / '.config' / 'mapsage' / 'secret') in text
    assert f'set {SECRET_FILE_VARIABLE}' in text
    secret = (home / '.config' / 'mapsage' / 'secret').read_text().strip()
    assert secret not in text and SECRET not in text
    with pytest.raises(SecretError):
        describe_secret({SECRET_VARIABLE: 'short'})


def test_a_home_without_hard_links_has_one_secret(home, monkeypatch):
    def refuse(*_, **__):
        raise OSError(95, 'Operation not supported')

    monkeypatch.setattr(os, 'link', refuse)
    first = job_secret(dict(HOME=str(home)))
    path = home / '.config/mapsage/secret'
    assert path.read_bytes().strip() == first == job_secret(dict(HOME=str(home)))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ['secret']


def test_the_secret_of_a_user_that_cannot_be_read_is_not_replaced(home, tmp_path):
    job_secret(dict(HOME=str(home)))
    path = home / '.config/mapsage/secret'
    path.unlink()
    path.symlink_to(tmp_path / 'gone')
    refused(dict(HOME=str(home)), str(path), 'cannot be read')


def test_an_empty_name_of_a_file_is_refused():
    refused({'MAPSAGE_SECRET_FILE': ''}, 'MAPSAGE_SECRET_FILE is empty')
