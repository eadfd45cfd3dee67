"""What the double refuses as CUDA does, and how functions that it does not have fail."""

from __future__ import annotations

import mmap
import os
import platform
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Set, Tuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

CUDA = torch.device('cuda', 1)
LIBRARY = Path(torch.__file__).parent / 'lib' / 'libtorch_cuda.so'
TABLE = Path(__file__).resolve().parents[1] / 'doubles/cuda/src/operators/refusals.cpp'

# Names that PyTorch's library passes to alertNotDeterministic and the double never does.
KNOWN_UNHANDLED = {
    # of variants that write into a given tensor; the double uses the name of the other variant
    'adaptive_avg_pool2d_backward_out_cuda',
    'adaptive_avg_pool3d_backward_out_cuda',
    'fractional_max_pool3d_backward_out_cuda',
    'max_pool3d_with_indices_backward_out_cuda',
    'replication_pad2d_backward_out_cuda',
    'replication_pad3d_backward_out_cuda',
    # PyTorch scatters by index_put in this mode, before it comes to this kernel
    'scatter_cuda_',
}


def sections(library: Path) -> Dict[str, Tuple[int, int]]:
    """Return the address and the size of the sections of a shared library."""
    listing = subprocess.run(
        ['readelf', '-SW', str(library)],
        check=True,
        stdout=subprocess.PIPE,
        universal_newlines=True,
    ).stdout
    rows = re.findall(r'\] (\S+) +\S+ +([0-9a-f]+) ([0-9a-f]+) ([0-9a-f]+) ', listing)
    # the addresses below are used as offsets in the file
    return {
        name: (int(address, 16), int(size, 16))
        for name, address, offset, size in rows
        if address.lstrip('0') == offset.lstrip('0')
    }


def jump_slot(library: Path, function: str) -> int:
    """Return the address where the library keeps the address of a function it imports."""
    listing = subprocess.run(
        ['readelf', '-rW', str(library)],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        universal_newlines=True,
    ).stdout
    [slot] = re.findall(rf'^([0-9a-f]+) .*{function}', listing, re.MULTILINE)
    return int(slot, 16)


def calls(library: Any, text: Tuple[int, int], target: int) -> Iterator[int]:
    """Yield the addresses of x86's calls of ``target``."""
    code = np.frombuffer(library, np.uint8, text[1], text[0])
    positions = np.flatnonzero(code[:-5] == 0xE8)
    distances = np.stack([code[positions + i] for i in range(1, 5)], 1).copy().view('<i4')[:, 0]
    yield from (positions[positions + 5 + distances == target - text[0]] + text[0]).tolist()


def names_of_alerts() -> Set[str]:
    """Return the names that PyTorch's CUDA library passes to alertNotDeterministic.

    Before each call, the machine code loads the address of the name: ``lea`` with a distance from
    the next instruction.
    """
    parts = sections(LIBRARY)
    slot = jump_slot(LIBRARY, 'alertNotDeterministic')
    with open(LIBRARY, 'rb') as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as library:
        library_bytes = memoryview(library)
        start, size = parts['.plt']
        [entry] = [
            at
            for at in range(start, start + size, 16)
            if library[at : at + 2] == b'\xff\x25'
            and at + 6 + struct.unpack('<i', library[at + 2 : at + 6])[0] == slot
        ]
        names = set()
        addresses = list(calls(library_bytes, parts['.text'], entry))
        library_bytes.release()
        for call in addresses:
            names.add(last_name(library, call, parts['.rodata']))
    return names


def last_name(library: mmap.mmap, call: int, data: Tuple[int, int]) -> str:
    """Return the name whose address is loaded last before the call."""
    for at in range(call - 7, call - 160, -1):
        if library[at] in (0x48, 0x4C) and library[at + 1] == 0x8D and library[at + 2] & 0xC7 == 5:
            address = at + 7 + struct.unpack('<i', library[at + 3 : at + 7])[0]
            if data[0] <= address < sum(data):
                text = library[address : address + 80].split(b'\0')[0]
                if re.fullmatch(rb'[\w ]{4,80}', text):
                    return text.decode()
    raise AssertionError(f'the call at {call:#x} has no name')


def names_in_table() -> Set[str]:
    source = TABLE.read_text()
    return {
        *re.findall(r'\{"aten::\w+", "([\w ]+)"\}', source),
        *re.findall(r'return "([\w ]+)";', source),
    }


@pytest.mark.skipif(platform.machine() != 'x86_64', reason='reads machine code of x86-64')
def test_the_table_has_the_names_of_this_pytorch() -> None:
    names, table = names_of_alerts(), names_in_table()
    assert len(table) > 30
    assert table - names == {'put_'}  # checked in PyTorch's CPU library, for both devices
    assert names - table == KNOWN_UNHANDLED


def image() -> torch.Tensor:
    return torch.arange(48.0, device=CUDA).view(1, 3, 4, 4).div(48)


def volume() -> torch.Tensor:
    return image()[:, None]


def row() -> torch.Tensor:
    return image()[0, 0, 0]


def positions() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.long, device=CUDA)


def labels() -> torch.Tensor:
    return torch.zeros(1, 4, 4, dtype=torch.long, device=CUDA)


def gradient(
    function: Callable[[torch.Tensor], torch.Tensor], tensor: Callable[[], torch.Tensor]
) -> Callable[[], None]:
    def run() -> None:
        function(tensor().requires_grad_()).sum().backward()

    return run


@pytest.mark.parametrize(
    'name, run',
    [
        ('nll_loss2d_forward_out_cuda_template', lambda: F.cross_entropy(image(), labels())),
        (
            'adaptive_avg_pool2d_backward_cuda',
            gradient(lambda t: torch._C._nn.adaptive_avg_pool2d(t, 3), image),
        ),  # mapsage replaces F's
        (
            'adaptive_max_pool2d_backward_cuda',
            gradient(lambda t: F.adaptive_max_pool2d(t, 3), image),
        ),
        ('avg_pool3d_backward_cuda', gradient(lambda t: F.avg_pool3d(t, 2), volume)),
        (
            'upsample_bicubic2d_backward_out_cuda',
            gradient(lambda t: F.interpolate(t, scale_factor=2, mode='bicubic'), image),
        ),
        (
            'upsample_bilinear2d_aa_backward_out_cuda',
            gradient(
                lambda t: F.interpolate(t, scale_factor=0.5, mode='bilinear', antialias=True), image
            ),
        ),
        (
            'reflection_pad1d_backward_out_cuda',
            gradient(lambda t: F.pad(t, (1, 1), mode='reflect'), lambda: image()[0]),
        ),
        (
            'grid_sampler_2d_backward_cuda',
            gradient(
                lambda t: F.grid_sample(
                    t, image().permute(0, 2, 3, 1)[..., :2], align_corners=False
                ),
                image,
            ),
        ),
        (
            'max_unpooling2d_forward_out',
            lambda: F.max_unpool2d(*F.max_pool2d(image(), 2, return_indices=True), 2),
        ),
        ('_histc_cuda with floating point input', lambda: image().histc()),
        ('_bincount_cuda', lambda: positions().bincount(row())),
        ('median CUDA with indices output', lambda: row().median(0)),
        ('index_reduce_cuda', lambda: row().clone().index_reduce_(0, positions(), row(), 'prod')),
        (
            'scatter_reduce_cuda_prod_',
            lambda: row().clone().scatter_reduce_(0, positions(), row(), 'prod'),
        ),
        ('put_', lambda: row().clone().put_(positions(), row(), accumulate=True)),
        (
            'embedding_bag_backward_cuda_max',
            gradient(
                lambda t: F.embedding_bag(positions()[None], t, mode='max'), lambda: image()[0, 0]
            ),
        ),
        ('CUBLAS_WORKSPACE_CONFIG', lambda: image() @ image()),
    ],
)
@pytest.mark.filterwarnings('ignore:index_reduce')
def test_deterministic_algorithms_refuse_what_cuda_refuses(
    name: str, run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv('CUBLAS_WORKSPACE_CONFIG', raising=False)
    run()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match=name):
            run()
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match=name):
            run()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    'run',
    [
        lambda: F.cross_entropy(image(), labels(), reduction='none'),
        lambda: row().cumsum(0),
        lambda: positions().bincount(),
        lambda: row().median(),
        lambda: image() @ image(),
        lambda: row().clone().scatter_reduce_(0, positions(), row(), 'sum'),
        gradient(lambda t: F.interpolate(t, scale_factor=2, mode='bilinear'), image),
        gradient(lambda t: F.pad(t, (1, 1), mode='replicate'), lambda: image()[0]),
    ],
)
def test_deterministic_algorithms_allow_what_cuda_allows(
    run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
    torch.use_deterministic_algorithms(True)
    try:
        run()
    finally:
        torch.use_deterministic_algorithms(False)


def compile_a_kernel() -> None:
    torch.cuda.jiterator._create_jit_fn('template <typename T> T f(T x) { return x; }')(row())


def test_a_function_that_the_runtime_lacks_fails_by_name(capfd: Any) -> None:
    with pytest.raises(RuntimeError, match='CUDA error: operation not supported'):
        image().untyped_storage()._share_cuda_()
    assert 'CUDA double: cudaIpcGetMemHandle is not supported' in capfd.readouterr().err


@pytest.mark.parametrize(
    'function, message, run',
    [
        ('cublasCreate_v2', 'CUBLAS_STATUS_NOT_SUPPORTED', torch.cuda.current_blas_handle),
        ('nvrtcVersion', 'CUDA NVRTC error: not supported by the CUDA double', compile_a_kernel),
        (
            'cuFileBufRegister',
            'cuFileBufRegister failed',
            lambda: torch.cuda.gds.gds_register_buffer(image().untyped_storage()),
        ),
    ],
)
def test_a_vendor_library_fails_with_an_error_of_its_own(
    function: str, message: str, run: Callable[[], Any], capfd: Any
) -> None:
    with pytest.raises(RuntimeError, match=message):
        run()
    assert f'CUDA double: {function} is not supported' in capfd.readouterr().err


def test_an_environment_without_devices_says_that_there_are_none() -> None:
    program = (
        'import torch; assert not torch.cuda.is_available(); '
        'assert torch.cuda.device_count() == 0; torch.ones(1, device="cuda")'
    )
    environ = {name: value for name, value in os.environ.items() if name != 'CUDA_DOUBLE_DEVICES'}
    done = subprocess.run(
        [sys.executable, '-c', program],
        env=environ,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    assert done.returncode == 1
    assert 'Found no NVIDIA driver' in done.stderr or 'No CUDA GPUs are available' in done.stderr
