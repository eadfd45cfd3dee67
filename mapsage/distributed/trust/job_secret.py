"""The secret that all processes of a job share, and that nobody else knows.

It comes from a variable, a file, or a file of this user that the first process makes. It never
comes from the rendezvous store, which anybody can read who reaches its port. An error shows where
the secret was looked for, and never what it is.

This file imports only the standard library, since launchers load it by its path.
"""
from __future__ import annotations

import contextlib
import os
import pwd
import stat
import tempfile
from pathlib import Path
from typing import Mapping, Optional

if __package__:
    from mapsage.errors import UserError
else:
    # The launcher loads this file by its path: it prints the errors itself, and importing mapsage
    # would take seconds.
    UserError = type('UserError', (Exception,), {})  # type: ignore[misc,assignment]

SECRET_VARIABLE = 'MAPSAGE_SECRET'
SECRET_FILE_VARIABLE = 'MAPSAGE_SECRET_FILE'
_RANDOM_BYTES = 32
_MIN_CHARACTERS = 32
_MAX_BYTES = 4096
_FOLDER, _NAME = 'mapsage', 'secret'
_MAKE_ONE = 'python -c "import os; print(os.urandom(32).hex())"'


class SecretError(UserError, ValueError):
    """The secret of this job is missing, too short, or not private."""


def new_secret() -> str:
    """Return a new secret: 64 hexadecimal digits."""
    return os.urandom(_RANDOM_BYTES).hex()


def job_secret(environ: Mapping[str, str]) -> bytes:
    """Return the secret of this job.

    ``MAPSAGE_SECRET`` holds it, or ``MAPSAGE_SECRET_FILE`` names a file with it. Without both, it
    is in ``mapsage/secret`` of this user's configuration folder. The first process makes that
    file, and all that start at the same time read the same one, also from a home folder on a
    network. Where there is no home folder to write to, the file is in a private folder of the
    temporary one.

    Args:
        environ: Variables of the environment.

    Raises:
        SecretError: If the variable or the file has no secret, or others may read the file.
    """
    if SECRET_VARIABLE in environ:
        return _checked(environ[SECRET_VARIABLE], SECRET_VARIABLE)
    if SECRET_FILE_VARIABLE in environ:
        path = Path(environ[SECRET_FILE_VARIABLE])
        where = f'{SECRET_FILE_VARIABLE}={str(path)!r}'
        try:
            return _read(path, where)
        except OSError as error:
            raise SecretError(
                f'{where} cannot be read ({error.strerror}): expected a file with the secret of '
                f'this job. Make one with (umask 077; {_MAKE_ONE} > FILE), and copy it to all '
                f'machines.') from error
    configuration = _configuration_folder(environ)
    if configuration is not None:
        try:
            configuration.mkdir(mode=0o700, parents=True, exist_ok=True)
            return _own_secret(configuration / _FOLDER)
        except OSError:  # no home folder, or a read-only one
            pass
    folder = Path(tempfile.gettempdir()) / f'{_FOLDER}-{os.getuid()}'
    try:
        return _own_secret(folder)
    except OSError as error:
        raise SecretError(
            f'neither the configuration folder of this user ({configuration}) nor {folder} can '
            f'hold the secret of this job ({error}): expected one of them to be writable. Or set '
            f'{SECRET_VARIABLE} to the same value on all machines: {_MAKE_ONE}.') from error


def describe_secret(environ: Mapping[str, str]) -> str:
    """Return a line that says where the secret of a job on several machines comes from.

    Args:
        environ: Variables of the environment.

    Raises:
        SecretError: As :func:`job_secret`.
    """
    job_secret(environ)
    if SECRET_VARIABLE in environ:
        return f'secret of the job: {SECRET_VARIABLE}, which must be the same on all machines'
    if SECRET_FILE_VARIABLE in environ:
        return (f'secret of the job: {SECRET_FILE_VARIABLE}={environ[SECRET_FILE_VARIABLE]}, which '
                f'must hold the same on all machines')
    folders = [Path(tempfile.gettempdir()) / f'{_FOLDER}-{os.getuid()}']
    configuration = _configuration_folder(environ)
    if configuration is not None:
        folders.insert(0, configuration / _FOLDER)
    path = next(folder / _NAME for folder in folders if (folder / _NAME).is_file())
    return (f'secret of the job: {path}. Machines that share this file need nothing else; to the '
            f'others copy it, with mode 0600, and set {SECRET_FILE_VARIABLE} to its path there')


def _configuration_folder(environ: Mapping[str, str]) -> Optional[Path]:
    """Return the folder of the XDG Base Directory Specification; None if there is no home."""
    named = environ.get('XDG_CONFIG_HOME', '')
    if os.path.isabs(named):
        return Path(named)
    home = environ.get('HOME', '')
    if not home:
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # a user id of a container without a name
            return None
    return Path(home, '.config') if os.path.isabs(home) else None


def _own_secret(folder: Path) -> bytes:
    """Return the secret in a folder that only this user can enter; both are made if missing."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    facts = folder.lstat()
    mode = stat.S_IMODE(facts.st_mode)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or mode & 0o077:
        kind = 'a folder' if stat.S_ISDIR(facts.st_mode) else 'no folder'
        raise SecretError(
            f'{folder} is {kind} of user {facts.st_uid} with mode {mode:04o}: expected a folder of '
            f'user {os.getuid()} with mode 0700, since it holds the secret of the jobs of this '
            f'user. Run chmod 700 {folder}, or remove it if it is not yours, or set '
            f'{SECRET_VARIABLE}.')
    path = folder / _NAME
    if not path.exists():
        _make(path)
    return _read(path, str(path))


def _make(path: Path) -> None:
    """Make the file with a new secret unless another process was first; it is never seen empty."""
    # Write another file and link it: with O_EXCL, other processes would see an empty file.
    beside = path.with_name(f'{path.name}.{os.urandom(8).hex()}')
    try:
        with open(beside, 'x', opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(new_secret() + '\n')
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(str(beside), str(path))
        except FileExistsError:
            pass
    finally:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()


def _read(path: Path, where: str) -> bytes:
    """Return the secret in a file that only this user can read."""
    # Of a named pipe nobody might ever write to, which would otherwise stop this process.
    with open(path, 'rb', opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        facts = os.fstat(file.fileno())
        mode = stat.S_IMODE(facts.st_mode)
        if not stat.S_ISREG(facts.st_mode):
            raise SecretError(f'{where} is no regular file: expected a file with the secret of '
                              f'this job.')
        if facts.st_uid != os.getuid():
            raise SecretError(f'{where} belongs to user {facts.st_uid}: expected a file of user '
                              f'{os.getuid()}, since who owns it knows the secret. Copy it: '
                              f'(umask 077; cp FILE COPY).')
        if mode & 0o077:
            raise SecretError(f'{where} has mode {mode:04o}, so others may read or write it: '
                              f'expected 0600. If nobody has read it, run chmod 600 {path}; else '
                              f'write a new secret into it: {_MAKE_ONE}.')
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise SecretError(f'{where} is longer than {_MAX_BYTES} bytes: expected one line with the '
                          f'secret of this job.')
    return _checked(content.decode('utf-8', 'surrogateescape'), where)


def _checked(text: str, where: str) -> bytes:
    text = text.strip()
    if len(text) < _MIN_CHARACTERS:
        raise SecretError(f'{where} has {len(text)} characters: expected a secret of at least '
                          f'{_MIN_CHARACTERS}. Make one: {_MAKE_ONE}. All machines of a job need '
                          f'the same one.')
    return text.encode('utf-8', 'surrogateescape')
