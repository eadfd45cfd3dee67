"""Finds the secret that only the processes of a job know.

The secret comes from an environment variable, from a file that a variable names, or from a file
that the first process creates for this user. It never comes from the rendezvous store, which any
process that reaches its port can read. Errors show where the secret was searched, never its value.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import tempfile
import time
from pathlib import Path
from typing import Mapping, Optional, Tuple

from mapsage_launcher.errors import UserError

SECRET_VARIABLE = 'MAPSAGE_SECRET'
SECRET_FILE_VARIABLE = 'MAPSAGE_SECRET_FILE'
_RANDOM_BYTES = 32
_MIN_CHARACTERS = 32
_MAX_BYTES = 4096
_FOLDER, _NAME = 'mapsage', 'secret'
# Time that another process may take to write the file, on a disk without hard links.
_WRITING_SECONDS, _PAUSE_SECONDS = 5.0, 0.05
_MAKE_ONE = 'python -c "import os; print(os.urandom(32).hex())"'


class SecretError(UserError, ValueError):
    """The secret of this job is missing, too short, or not private."""


def new_secret() -> str:
    """Return a new secret: 64 hexadecimal digits."""
    return os.urandom(_RANDOM_BYTES).hex()


def job_secret(environ: Mapping[str, str]) -> bytes:
    """Return the secret of this job.

    ``MAPSAGE_SECRET`` is the secret, or ``MAPSAGE_SECRET_FILE`` names a file with it. Without both,
    the secret is in ``mapsage/secret`` of this user's configuration folder. The first process
    creates that file. Processes that start at the same time read the same secret, even if the home
    folder is on a network disk. If there is no writable home folder, the file is in a private
    folder inside the temporary folder.

    Args:
        environ: Variables of the environment.

    Raises:
        SecretError: If the variable or the file has no secret, or others may read the file.
    """
    return _find_secret(environ)[0]


def _find_secret(environ: Mapping[str, str]) -> Tuple[bytes, Optional[Path]]:
    """Return the secret, and the path of the user's file if it comes from there."""
    if SECRET_VARIABLE in environ:
        return _check_length(environ[SECRET_VARIABLE], SECRET_VARIABLE), None
    if SECRET_FILE_VARIABLE in environ:
        if not environ[SECRET_FILE_VARIABLE]:
            raise SecretError(
                f'{SECRET_FILE_VARIABLE} is empty: expected the path of a file with '
                f'the secret of this job. Unset it, or name the file.'
            )
        path = Path(environ[SECRET_FILE_VARIABLE])
        origin = f'{SECRET_FILE_VARIABLE}={str(path)!r}'
        try:
            return _read(path, origin), None
        except OSError as error:
            raise SecretError(
                f'{origin} cannot be read ({error.strerror}): expected a file with the secret of '
                f'this job. Make one with (umask 077; {_MAKE_ONE} > FILE), and copy it to all '
                f'machines.'
            ) from error
    configuration = _configuration_folder(environ)
    if configuration is not None:
        path = configuration / _FOLDER / _NAME
        try:
            configuration.mkdir(mode=0o700, exist_ok=True)
            return _secret_in_folder(path.parent), path
        except OSError as error:
            # If the file does not exist, the home folder is missing or read-only: go to the next.
            if os.path.lexists(str(path)):
                raise SecretError(
                    f'{path} has the secret of this user and cannot be read '
                    f'({error.strerror}). Repair or remove it.'
                ) from error
    folder = Path(tempfile.gettempdir()) / f'{_FOLDER}-{os.getuid()}'
    try:
        return _secret_in_folder(folder), folder / _NAME
    except OSError as error:
        raise SecretError(
            f'neither the configuration folder of this user ({configuration}) nor {folder} can '
            f'hold the secret of this job ({error}): expected one of them to be writable. Or set '
            f'{SECRET_VARIABLE} to the same value on all machines: {_MAKE_ONE}.'
        ) from error


def describe_secret(environ: Mapping[str, str]) -> str:
    """Return a line for the log: the origin of the secret of a job on several machines.

    Args:
        environ: Variables of the environment.

    Raises:
        SecretError: As :func:`job_secret`.
    """
    path = _find_secret(environ)[1]
    if SECRET_VARIABLE in environ:
        return f'secret of the job: {SECRET_VARIABLE}, which must be the same on all machines'
    if SECRET_FILE_VARIABLE in environ:
        return (
            f'secret of the job: {SECRET_FILE_VARIABLE}={environ[SECRET_FILE_VARIABLE]}, which '
            f'must hold the same on all machines'
        )
    return (
        f'secret of the job: {path}. Machines that share this file need nothing else; to the '
        f'others copy it, with mode 0600, and set {SECRET_FILE_VARIABLE} to its path there'
    )


def _configuration_folder(environ: Mapping[str, str]) -> Optional[Path]:
    """Return the folder of the XDG Base Directory Specification; None if there is no home."""
    named = environ.get('XDG_CONFIG_HOME', '')
    if os.path.isabs(named):
        return Path(named)
    home = environ.get('HOME', '')
    if not home:
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        # In a container, the user id may have no name.
        except KeyError:
            return None
    return Path(home, '.config') if os.path.isabs(home) else None


def _secret_in_folder(folder: Path) -> bytes:
    """Return the secret in a folder that only this user can enter; create what is missing."""
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
            f'{SECRET_VARIABLE}.'
        )
    path = folder / _NAME
    if not path.exists():
        _create_secret_file(path)
    deadline = time.monotonic() + _WRITING_SECONDS
    while not path.stat().st_size and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
    return _read(path, str(path))


def _create_secret_file(path: Path) -> None:
    """Create the file with a new secret, unless another process was faster."""
    # Write a temporary file and link it: after O_EXCL, other processes would see an empty file.
    temporary = path.with_name(f'{path.name}.{os.urandom(8).hex()}')
    try:
        with open(temporary, 'x', opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(new_secret() + '\n')
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(str(temporary), str(path))
        except FileExistsError:
            pass
        except OSError:
            # Some network disks have no hard links. Another process may find the file empty for a
            # moment, and then waits for its content.
            with contextlib.suppress(FileExistsError):
                descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with open(descriptor, 'wb') as file:
                    file.write(temporary.read_bytes())
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def _read(path: Path, origin: str) -> bytes:
    """Return the secret in a file that only this user can read."""
    # O_NONBLOCK, because opening a named pipe would otherwise wait for a writer.
    with open(path, 'rb', opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        facts = os.fstat(file.fileno())
        mode = stat.S_IMODE(facts.st_mode)
        if not stat.S_ISREG(facts.st_mode):
            raise SecretError(
                f'{origin} is no regular file: expected a file with the secret of this job.'
            )
        # Kubernetes mounts a Secret read-only: files of root, which the pod's fsGroup may read.
        is_mounted_secret = facts.st_uid == 0 and bool(
            os.fstatvfs(file.fileno()).f_flag & os.ST_RDONLY
        )
        if facts.st_uid != os.getuid() and not is_mounted_secret:
            raise SecretError(
                f'{origin} belongs to user {facts.st_uid}: expected a file of user '
                f'{os.getuid()}, since its owner knows the secret. Copy it: '
                f'(umask 077; cp FILE COPY).'
            )
        if mode & (0o037 if is_mounted_secret else 0o077):
            repair = (
                'set defaultMode: 0400 in its volume of Kubernetes'
                if is_mounted_secret
                else f'run chmod 600 {path}'
            )
            raise SecretError(
                f'{origin} has mode {mode:04o}, so others may read or write it: '
                f'expected 0600. If nobody has read it, {repair}; else '
                f'write a new secret into it: {_MAKE_ONE}.'
            )
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise SecretError(
            f'{origin} is longer than {_MAX_BYTES} bytes: expected one line with the '
            f'secret of this job.'
        )
    return _check_length(content.decode('utf-8', 'surrogateescape'), origin)


def _check_length(text: str, origin: str) -> bytes:
    """Return the secret without white space at its ends; SecretError if it is too short."""
    text = text.strip()
    if len(text) < _MIN_CHARACTERS:
        raise SecretError(
            f'{origin} has {len(text)} characters: expected a secret of at least '
            f'{_MIN_CHARACTERS}. Make one: {_MAKE_ONE}. All machines of a job need '
            f'the same one.'
        )
    return text.encode('utf-8', 'surrogateescape')
