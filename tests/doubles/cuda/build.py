"""Build the double of CUDA over this Python's environment, and print the path of a Python with it.

    python tests/doubles/cuda/build.py

With the printed Python, ``CUDA_DOUBLE_DEVICES=8`` makes 8 CUDA devices. Its environment lies on top
of this one, and is named after the sources of the double: checkouts that differ in them share the
PyTorch below. Needs g++ or clang++, and once a machine the network, for two small wheels with
NVIDIA's headers. A second call does nothing. Exit status 4: compiling failed; 5: PyTorch's CUDA
build, a compiler or the headers cannot be had here.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import List, NamedTuple, Optional

from stand_ins import TORCH_LIBRARIES, VENDOR_LIBRARIES, missing_source, read_symbols, vendor_source

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = Path(sys.prefix) / 'doubles'

COMPILE_FAILED, NOT_AVAILABLE = 4, 5
_CUDA = '13.0'
_FLAGS = ('-std=c++20', '-fPIC', '-fvisibility=hidden', '-Wall', '-Wextra')
_TIMEOUT_SECONDS = 900


class BuildError(Exception):
    """The double cannot be built; with the exit status that says why."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Part(NamedTuple):
    """A library that is compiled from a folder of ``src``."""

    folder: str
    library: str
    missing: str  # a regular expression for functions that PyTorch imports from it
    error: str  # what those return that the folder lacks; empty: an error of the runtime
    optimization: str  # the headers of PyTorch take long to optimize


RUNTIME = Part('runtime', 'libcudart.so.13', '(__)?cuda[A-Z]', '', '-O2')
PARTS_OVER_RUNTIME = (
    Part('driver', 'libcuda.so.1', 'cu[A-Z](?!ile)', '801', '-O2'),  # CUDA_ERROR_NOT_SUPPORTED
    Part('nccl', 'libnccl.so.2', 'nccl[A-Z]', '5', '-O2'),  # ncclInvalidUsage
    Part('operators', 'libcuda_double_operators.so', '(?!)', '0', '-O1'),
)


class Torch(NamedTuple):
    """PyTorch, as installed; it is not imported, which would take seconds."""

    folder: Path
    version: str


def find_torch() -> Torch:
    """Return the PyTorch of this environment.

    Raises:
        BuildError: If there is none, or it is not built for CUDA 13.0.
    """
    spec = importlib.util.find_spec('torch')
    if spec is None or spec.origin is None:
        raise BuildError(
            f'{sys.executable} has no torch; install its CUDA build, for example: '
            f'pip install --no-deps torch==2.14.1',
            NOT_AVAILABLE,
        )
    folder = Path(spec.origin).parent
    text = (folder / 'version.py').read_text()
    version = re.search(r"__version__ = '(.+)'", text)
    cuda = re.search(r"^cuda\b.* = '(.+)'", text, re.MULTILINE)
    if version is None or cuda is None or cuda.group(1) != _CUDA:
        raise BuildError(
            f'torch {version.group(1) if version else ""} of {sys.executable} is built for '
            f'{"CUDA " + cuda.group(1) if cuda else "no CUDA"}; the double needs a build for CUDA '
            f'{_CUDA}, as pip install torch==2.14.1 gives it on Linux',
            NOT_AVAILABLE,
        )
    return Torch(folder, version.group(1))


def find_compiler() -> str:
    """Return the path of a C++ compiler: ``$CXX``, g++ or clang++.

    Raises:
        BuildError: If there is none, or no ``nm``.
    """
    named = os.environ.get('CXX')
    for name in [named] if named else ['g++', 'clang++']:
        path = shutil.which(name)
        if path and shutil.which('nm'):
            return path
    raise BuildError(
        f'the double of CUDA is compiled, and no C++20 compiler with nm was found '
        f'(CXX={named or ""!r}; looked for g++, clang++). Install one, for example: '
        f'apt install g++',
        NOT_AVAILABLE,
    )


def source_files() -> List[Path]:
    """Return everything that the result depends on and is in this folder."""
    return sorted(
        [*HERE.glob('*.py'), *(HERE / 'src').rglob('*.cpp'), *(HERE / 'src').rglob('*.h')]
    )


def build_key(torch: Torch) -> str:
    """Return a hash of the sources, of this file and of PyTorch's version."""
    digest = hashlib.sha256(f'{torch.version} {torch.folder}'.encode())
    for path in source_files():
        digest.update(str(path.relative_to(HERE)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def fetch_headers() -> Path:
    """Return the folder with CUDA's headers, which are downloaded once a machine (5 MB).

    Raises:
        BuildError: If they cannot be downloaded.
    """
    cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
    headers = cache / 'mapsage' / 'cuda_double' / f'headers-{_CUDA}'
    include = headers / 'nvidia' / 'cu13' / 'include'
    if include.is_dir():
        return include
    headers.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=headers.parent) as folder:
        command = [
            sys.executable,
            '-m',
            'pip',
            'install',
            '-q',
            '--disable-pip-version-check',
            '--no-deps',
            '--target',
            f'{folder}/headers',
            f'nvidia-cuda-runtime=={_CUDA}.*',
            f'nvidia-cuda-crt=={_CUDA}.*',
        ]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
            timeout=_TIMEOUT_SECONDS,
        )
        if done.returncode != 0:
            raise BuildError(
                f"CUDA's headers could not be downloaded: {done.stdout[-2000:]}", NOT_AVAILABLE
            )
        try:
            os.rename(f'{folder}/headers', headers)
        except OSError:  # another environment's build was faster
            if not include.is_dir():
                raise
    return include


class Compilation:
    """The compilation of all libraries into a folder."""

    def __init__(self, torch: Torch, compiler: str, include: Path, folder: Path) -> None:
        self._torch, self._compiler, self._include, self._folder = torch, compiler, include, folder
        libraries = [torch.folder / 'lib' / f'lib{name}.so' for name in TORCH_LIBRARIES]
        try:
            self._imported = read_symbols('--undefined-only', libraries)
        except subprocess.CalledProcessError as error:
            raise BuildError(
                f'nm cannot read the libraries of torch {torch.version} in '
                f'{torch.folder / "lib"}: is this its CUDA build for Linux?',
                NOT_AVAILABLE,
            ) from error

    def run(self) -> List[Path]:
        """Compile and return the libraries.

        Raises:
            BuildError: If the compiler fails; with its last output.
        """
        libraries = [self._compile(RUNTIME, None)]
        with ThreadPoolExecutor(2) as pool:
            tasks = [
                pool.submit(self._compile, part, libraries[0])
                for part in reversed(PARTS_OVER_RUNTIME)
            ]  # the slowest first
            libraries += self._compile_vendor_libraries(libraries[0])
            libraries += [task.result() for task in tasks]
        return libraries

    def _compile(self, part: Part, runtime: Optional[Path]) -> Path:
        # One translation unit for a library: PyTorch's headers take most of the time.
        unit = self._folder / f'{part.folder}.cpp'
        sources = sorted((HERE / 'src' / part.folder).glob('*.cpp'))
        unit.write_text(''.join(f'#include "{path}"\n' for path in sources))
        compiled = self._folder / f'{part.folder}.o'
        root = self._torch.folder
        self._call(
            [
                *_FLAGS,
                part.optimization,
                '-isystem',
                str(self._include),
                '-isystem',
                str(root / 'include'),
                '-isystem',
                str(root / 'include' / 'torch' / 'csrc' / 'api' / 'include'),
                '-c',
                str(unit),
                '-o',
                str(compiled),
            ]
        )
        # nm -D lists a shared library only, so that it is linked twice.
        library = self._folder / part.library
        self._link(library, [compiled], runtime, part)
        defined = {name for name, _ in read_symbols('--defined-only', [library])}
        missing = self._folder / f'{part.folder}_missing.c'
        missing.write_text(missing_source(part.missing, part.error, self._imported, defined))
        self._link(library, [compiled, missing], runtime, part)
        return library

    def _link(self, library: Path, files: List[Path], runtime: Optional[Path], part: Part) -> None:
        arguments = ['-shared', '-fPIC', '-o', str(library), f'-Wl,-soname,{library.name}']
        for file in files:
            arguments += ['-x', 'c' if file.suffix == '.c' else 'none', str(file), '-x', 'none']
        if runtime is None:  # PyTorch asks for functions of this version
            versions = self._folder / 'versions'
            versions.write_text(f'{library.name} {{ global: *; }};\n')
            arguments += [f'-Wl,--version-script={versions}']
        else:
            arguments += [str(runtime)]
        if part.folder == 'operators':
            arguments += [
                f'-L{self._torch.folder / "lib"}',
                '-ltorch_cuda',
                '-ltorch_cpu',
                '-lc10_cuda',
                '-lc10',
                '-Wl,--allow-shlib-undefined',
            ]
        self._call([*arguments, '-lpthread', '-ldl'])

    def _compile_vendor_libraries(self, runtime: Path) -> List[Path]:
        libraries = []
        for vendor in VENDOR_LIBRARIES:
            source, versions = vendor_source(vendor, self._imported)
            library = self._folder / vendor.name
            (self._folder / f'{vendor.name}.c').write_text(source)
            (self._folder / f'{vendor.name}.map').write_text(versions)
            self._call(
                [
                    '-shared',
                    '-fPIC',
                    '-o',
                    str(library),
                    f'-Wl,-soname,{vendor.name}',
                    f'-Wl,--version-script={library}.map',
                    '-x',
                    'c',
                    f'{library}.c',
                    '-x',
                    'none',
                    str(runtime),
                ]
            )
            libraries.append(library)
        return libraries

    def _call(self, arguments: List[str]) -> None:
        try:
            done = subprocess.run(
                [self._compiler, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                universal_newlines=True,
                timeout=_TIMEOUT_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(
                f'{self._compiler} could not compile the double of CUDA: {error}', COMPILE_FAILED
            ) from error
        if done.returncode != 0:
            raise BuildError(
                f'{self._compiler} could not compile the double of CUDA for torch '
                f'{self._torch.version}; it needs C++20: {done.stdout[-3000:]}',
                COMPILE_FAILED,
            )
        if done.stdout:
            print(done.stdout, file=sys.stderr)


def make_environment(folder: Path, libraries: List[Path]) -> None:
    """Make an environment with the double, on top of this one.

    A .pth file names the folders in which its Python looks as well. Nothing else is installed
    there, so that it has no pip.
    """
    venv.create(folder)
    version = f'python{sys.version_info.major}.{sys.version_info.minor}'
    site = folder / 'lib' / version / 'site-packages'
    below = [path for path in sys.path if Path(path).name == 'site-packages']
    (site / 'below.pth').write_text(''.join(f'{path}\n' for path in below))
    (site / 'cuda_double').mkdir()
    for path in [*libraries, HERE / 'boot.py']:
        shutil.copy(path, site / 'cuda_double')
    (site / 'cuda_double.pth').write_text('import cuda_double.boot\n')
    info = site / 'cuda_double-1.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text('Metadata-Version: 2.1\nName: cuda_double\nVersion: 1\n')


def check_environment(folder: Path) -> None:
    """Compute a sum on the second of two devices, in a new process.

    Raises:
        BuildError: If the process fails.
    """
    program = 'import torch; assert float(torch.ones(3, device="cuda:1").sum()) == 3'
    done = subprocess.run(
        [str(folder / 'bin' / 'python'), '-c', program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        env={**os.environ, 'CUDA_DOUBLE_DEVICES': '2'},
    )
    if done.returncode != 0:
        raise BuildError(
            f'the double of CUDA was built and does not work: {done.stdout[-3000:]}', COMPILE_FAILED
        )


def build() -> Path:
    """Return the Python of the environment with the double, which is built first if necessary.

    Of processes that do so at once only one compiles. The others wait for its file lock, which the
    system releases even if that process is killed.

    Raises:
        BuildError: If it cannot be built.
    """
    torch = find_torch()
    environment = ENVIRONMENTS / build_key(torch)
    python = environment / 'bin' / 'python'
    if environment.exists():
        return python
    ENVIRONMENTS.mkdir(exist_ok=True)
    with open(ENVIRONMENTS / f'{environment.name}.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if environment.exists():
            return python
        compiler, include = find_compiler(), fetch_headers()
        print(
            f'[cuda double] compiling with {compiler} for torch {torch.version} (half a minute, '
            f'once) into {environment}',
            file=sys.stderr,
            flush=True,
        )
        with tempfile.TemporaryDirectory(dir=ENVIRONMENTS) as folder:
            complete = Path(folder) / 'environment'
            make_environment(complete, Compilation(torch, compiler, include, Path(folder)).run())
            check_environment(complete)
            os.rename(complete, environment)
    return python


if __name__ == '__main__':
    try:
        print(build())
    except BuildError as error:
        print(f'[cuda double] {error}', file=sys.stderr)
        sys.exit(error.status)
