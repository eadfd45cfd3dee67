"""C sources of functions that PyTorch imports from NVIDIA's libraries and the double does not have.

Each of them fails with its name, and with an error of its library that PyTorch reports. With them
PyTorch loads without NVIDIA's wheels.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Dict, Iterable, List, NamedTuple, Set, Tuple

# The libraries of PyTorch that import functions of NVIDIA's.
TORCH_LIBRARIES = (
    'c10_cuda',
    'torch_cpu',
    'torch_cuda',
    'torch_python',
    'torch_cuda_linalg',
    'torch_nvshmem',
    'caffe2_nvrtc',
)


class Library(NamedTuple):
    """A library of NVIDIA, with the name that its wheel for CUDA 13 has."""

    name: str
    functions: str  # a regular expression for the beginning of their names
    error: int  # what a function returns, of the library's own type


# The errors are the ones named after the number, in the header of the library.
VENDOR_LIBRARIES = (
    Library('libcublas.so.13', 'cublas(?!Lt)', 15),  # CUBLAS_STATUS_NOT_SUPPORTED
    Library('libcublasLt.so.13', 'cublasLt', 15),  # CUBLAS_STATUS_NOT_SUPPORTED
    Library('libcudnn.so.9', 'cudnn', 3000),  # CUDNN_STATUS_NOT_SUPPORTED
    Library('libcufft.so.12', 'cufft', 16),  # CUFFT_NOT_SUPPORTED
    Library('libcurand.so.10', 'curand', 999),  # CURAND_STATUS_INTERNAL_ERROR
    Library('libcusolver.so.12', 'cusolver', 9),  # CUSOLVER_STATUS_NOT_SUPPORTED
    Library('libcusparse.so.12', 'cusparse(?!Lt)', 10),  # CUSPARSE_STATUS_NOT_SUPPORTED
    Library('libcusparseLt.so.0', 'cusparseLt', 10),  # CUSPARSE_STATUS_NOT_SUPPORTED
    Library('libnvrtc.so.13', 'nvrtc', 11),  # NVRTC_ERROR_INTERNAL_ERROR
    Library('libcupti.so.13', 'cupti', 27),  # CUPTI_ERROR_NOT_SUPPORTED
    Library('libnvshmem_host.so.3', 'nvshmem', 3),  # NVSHMEMX_ERROR_NOT_SUPPORTED
    Library('libcufile.so.0', 'cuFile', 5007),
)  # CU_FILE_PLATFORM_NOT_SUPPORTED

# What must not fail, or gives a text. PyTorch refuses another cuDNN than it was built with (9.24).
_TEXT = '"not supported by the CUDA double"'
BODIES: Dict[str, str] = {
    'cudnnGetVersion': 'size_t cudnnGetVersion(void) { return 92400; }',
    'cudnnGetCudartVersion': 'size_t cudnnGetCudartVersion(void) { return 13000; }',
    'cudnnGetProperty': 'int cudnnGetProperty(int part, int* value) '
    '{ *value = part == 0 ? 9 : part == 1 ? 24 : 0; return 0; }',
    'cudnnGetErrorString': f'const char* cudnnGetErrorString(int status) {{ (void)status; return {_TEXT}; }}',
    'cudnnGetLastErrorString': 'void cudnnGetLastErrorString(char* text, size_t size) '
    f'{{ snprintf(text, size, {_TEXT}); }}',
    'cusparseGetErrorString': f'const char* cusparseGetErrorString(int status) '
    f'{{ (void)status; return {_TEXT}; }}',
    'nvrtcGetErrorString': f'const char* nvrtcGetErrorString(int status) {{ (void)status; return {_TEXT}; }}',
    'cuptiGetResultString': 'int cuptiGetResultString(int status, const char** text) '
    f'{{ (void)status; *text = {_TEXT}; return 0; }}',
}


def read_symbols(option: str, files: Iterable[Path]) -> Set[Tuple[str, str]]:
    """Return the names and versions of symbols that ``nm`` lists (an empty version: none).

    Raises:
        CalledProcessError: If nm cannot read a file.
        OSError: If there is no nm.
    """
    listing = subprocess.run(
        ['nm', '-D', option, *map(str, files)],
        check=True,
        stdout=subprocess.PIPE,
        universal_newlines=True,
    ).stdout
    words = [line.split()[-1] for line in listing.splitlines() if len(line.split()) >= 2]
    return {(word.split('@')[0], word.split('@')[-1] if '@' in word else '') for word in words}


def failing_functions(names: Iterable[str], report: str, error: str) -> str:
    """Return C of functions that call ``report`` with their name and return ``error``."""
    return ''.join(
        f'EXPORT int {name}(void) {{ {report}("{name}"); return {error}; }}\n'
        for name in sorted(names)
    )


PROLOGUE = """#include <stddef.h>
#include <stdio.h>
#define EXPORT __attribute__((visibility("default")))
int cuda_double_fail_unsupported(const char* name);
void cuda_double_report_unsupported(const char* name);
"""


def vendor_source(library: Library, imported: Set[Tuple[str, str]]) -> Tuple[str, str]:
    """Return the C source and the linker's version script of a library's stand-in."""
    functions = [(name, version) for name, version in imported if re.match(library.functions, name)]
    names = {name for name, _ in functions}
    versions: List[str] = sorted({version for _, version in functions if version})
    bodies = ''.join(f'EXPORT {BODIES[name]}\n' for name in sorted(names & set(BODIES)))
    source = (
        PROLOGUE
        + bodies
        + failing_functions(
            names - set(BODIES), 'cuda_double_report_unsupported', str(library.error)
        )
    )
    return source, '%s { global: *; };\n' % (versions[0] if versions else library.name)


def missing_source(
    prefix: str, error: str, imported: Set[Tuple[str, str]], defined: Set[str]
) -> str:
    """Return C of the functions that PyTorch imports and a library of the double lacks.

    Args:
        prefix: A regular expression for the beginning of the functions' names.
        error: Value that they return; empty for an error of the CUDA runtime, which is remembered.
        imported: What PyTorch's libraries import.
        defined: What the library defines.
    """
    names = {name for name, _ in imported if re.match(prefix, name)} - defined
    if error:
        return PROLOGUE + failing_functions(names, 'cuda_double_report_unsupported', error)
    return PROLOGUE + ''.join(
        f'EXPORT int {name}(void) {{ return cuda_double_fail_unsupported("{name}"); }}\n'
        for name in sorted(names)
    )
