"""Compilation of the simulator's backend, once for each machine and version of torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List, Optional

import torch

from .settings import SimulatorError

SOURCE = Path(__file__).with_name('backend.cpp')
# SOURCE includes the headers.
_SOURCES = (SOURCE, *sorted(SOURCE.parent.glob('*.h')))
# The headers of torch 2.13 need C++20. The build takes half a minute on one core.
_FLAGS = ('-O1', '-std=c++20', '-fPIC', '-shared', '-w')
_TIMEOUT_SECONDS = 900


def compiler() -> Optional[str]:
    """Return the path of the C++ compiler: ``$CXX``, ``c++``, ``g++`` or ``clang++``."""
    named = os.environ.get('CXX')
    for name in [named] if named else ['c++', 'g++', 'clang++']:
        path = shutil.which(name)
        if path:
            return path
    return None


def library_path() -> Path:
    """Return the path of the compiled backend, which need not exist.

    The user's cache folder (``XDG_CACHE_HOME``) has one file for each source and installed torch.
    """
    build = [torch.__version__, torch.__file__, *_FLAGS]
    code = b''.join(source.read_bytes() for source in _SOURCES)
    key = hashlib.sha256('\n'.join(build).encode() + code).hexdigest()[:16]
    cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
    return cache / 'mapsage' / 'simulator' / f'{key}.so'


def build_library() -> Path:
    """Return the path of the compiled backend, which is compiled first if necessary.

    Of ranks that start together only one compiles. The others wait for its file lock, which the
    system releases even if that rank is killed.

    Raises:
        SimulatorError: If there is no compiler, or it fails; the message includes its last output.
    """
    library = library_path()
    if library.exists():
        return library
    program = compiler()
    if program is None:
        raise SimulatorError(
            f'the simulator is compiled on first use and no C++ compiler was found (CXX='
            f'{os.environ.get("CXX", "")!r}; looked for c++, g++, clang++). Install one, for '
            f'example: apt install g++.'
        )
    import fcntl  # not on Windows; there is no simulator there

    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.with_suffix('.lock'), 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(program, library)
    return library


def _compile(program: str, library: Path) -> None:
    print(
        f'[simulator] compiling the backend for torch {torch.__version__} with {program} (half a '
        f'minute, once) into {library}',
        file=sys.stderr,
        flush=True,
    )
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        out = Path(folder) / library.name
        try:
            done = subprocess.run(
                [program, *_arguments(out)],
                timeout=_TIMEOUT_SECONDS,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                universal_newlines=True,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SimulatorError(
                f'the simulator could not be compiled with {program}: {error}. '
                f'Set CXX to another compiler.'
            ) from error
        if done.returncode != 0:
            raise SimulatorError(
                f'the simulator could not be compiled with {program} for torch '
                f'{torch.__version__} (exit status {done.returncode}): {done.stdout[-2000:]}\n'
                f'It needs a C++20 compiler; set CXX to another one.'
            )
        os.replace(out, library)


def _arguments(out: Path) -> List[str]:
    root = Path(torch.__file__).parent
    include = root / 'include'
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [
        *_FLAGS,
        f'-D_GLIBCXX_USE_CXX11_ABI={abi}',
        f'-I{include}',
        f'-I{include / "torch" / "csrc" / "api" / "include"}',
        str(SOURCE),
        '-o',
        str(out),
        f'-L{root / "lib"}',
        '-ltorch_cpu',
        '-lc10',
    ]
