"""Simulated devices are PyTorch devices, with the errors and the accounts of real ones."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import subprocess
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from support import ROOT, no_simulated_cards
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from warm_python import warm_python

from mapsage.accelerator import resolve_accelerator
from mapsage.extras import simulator
from mapsage.extras.simulator import SimulatorError
from mapsage.extras.simulator.build import library_path

reason = no_simulated_cards()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))


@pytest.fixture(scope='module', autouse=True)
def sim() -> Any:
    return resolve_accelerator('sim')


def run_python(code: str, folder: Path, **environ: str) -> subprocess.CompletedProcess:
    """Run ``code`` with a simulator of its own settings; the script is written to ``folder``."""
    begin = (
        'import torch\nfrom mapsage.accelerator import resolve_accelerator\n'
        'sim = resolve_accelerator("sim")\n'
    )
    script = folder / 'script.py'
    script.write_text(begin + code)
    return subprocess.run(
        [warm_python(), str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        timeout=300,
        env={**os.environ, 'PYTHONPATH': str(ROOT), **environ},
    )


def test_eight_devices_of_the_vendors_surface() -> None:
    assert torch.gcu.device_count() == 8 and torch.gcu.is_available()
    assert torch.ones(2).gcu().is_gcu
    assert torch.ones(2, device='gcu:5').device == torch.device('gcu', 5)
    with torch.gcu.device(3):
        assert torch.zeros(1, device='gcu').device.index == 3
    assert torch.gcu.current_device() == 0
    assert 'imulated' in torch.gcu.get_device_name(1)


@pytest.mark.parametrize(
    'mix',
    [
        lambda: torch.ones(3, device='gcu:2') + torch.ones(3, device='gcu:1'),
        lambda: torch.ones(3, device='gcu:2') * torch.ones(3),
        lambda: torch.ones(3, 3) @ torch.ones(3, 3, device='gcu:2'),
        lambda: torch.stack([torch.ones(3, device='gcu:2'), torch.ones(3, device='gcu:3')]),
        lambda: F.conv2d(torch.ones(1, 1, 4, 4, device='gcu:2'), torch.ones(1, 1, 3, 3)),
        lambda: F.batch_norm(torch.ones(2, 1, 4, 4, device='gcu:2'), torch.ones(1), torch.ones(1)),
        lambda: F.cross_entropy(torch.ones(2, 3, device='gcu:2'), torch.tensor([0, 1])),
    ],
)
def test_mixing_devices_raises_pytorchs_words(mix: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match='Expected all tensors to be on the same device'):
        mix()


def test_scalars_and_indices_may_stay_on_the_cpu() -> None:
    values = torch.arange(4.0, device='gcu:2')
    assert (values * torch.tensor(2.0)).cpu().tolist() == [0, 2, 4, 6]
    assert values[torch.tensor([3, 1])].cpu().tolist() == [3, 1]
    assert values[torch.tensor([True, False, True, False])].cpu().tolist() == [0, 2]


def test_views_share_memory_and_writes_go_through() -> None:
    base = torch.zeros(4, 6, device='gcu:1')
    views = [
        base.view(24),
        base.t(),
        base[1:3, ::2],
        base.unfold(1, 3, 3),
        *base.split(2),
        base.expand(2, 4, 6),
        base.as_strided((2, 2), (6, 1), 1),
    ]
    before = torch.gcu.memory_allocated(1)
    for view in views:
        assert view.device == base.device
        assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    base[1:3, ::2].fill_(7.0)
    assert base.t().sum().item() == 42
    assert torch.gcu.memory_allocated(1) == before


def test_outputs_are_resized_and_storages_exchanged() -> None:
    out = torch.empty(0, device='gcu:1')
    torch.add(torch.ones(2, 3, device='gcu:1'), 1, out=out)
    assert out.cpu().tolist() == [[2.0] * 3] * 2
    grown = torch.arange(3.0, device='gcu:1').resize_(2, 4)
    assert grown.shape == (2, 4) and grown.flatten()[:3].cpu().tolist() == [0, 1, 2]
    other = torch.ones(5, device='gcu:1')
    exchanged = torch.zeros(1, device='gcu:1').set_(other)
    assert exchanged.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    parameter = nn.Parameter(torch.zeros(2, device='gcu:1'))
    parameter.data = torch.ones(3, device='gcu:1')
    assert parameter.sum().item() == 3


@pytest.mark.parametrize(
    'pin',
    [
        lambda: torch.ones(3).pin_memory(),
        lambda: torch.empty(3, pin_memory=True),
        lambda: torch.empty(0, 3).pin_memory(),
        lambda: next(iter(DataLoader([torch.ones(3)] * 2, batch_size=2, pin_memory=True))),
    ],
    ids=['copied', 'allocated', 'empty', 'loaded'],
)
def test_pinned_memory_is_known_as_such(pin: Callable[[], torch.Tensor]) -> None:
    pinned = pin()
    assert pinned.device.type == 'cpu'
    assert pinned.is_pinned() == (pinned.numel() > 0)
    assert pinned[1:].is_pinned() == (pinned[1:].numel() > 0)
    assert torch.equal(pinned.gcu(2).cpu(), pinned)
    assert not pinned.clone().is_pinned() and not torch.ones(3).is_pinned()


def test_freed_memory_is_no_longer_pinned() -> None:
    pinned = torch.ones(1000).pin_memory()
    address = pinned.data_ptr()
    del pinned
    buffer = (ctypes.c_float * 1).from_address(address)
    assert not torch.frombuffer(buffer, dtype=torch.float32).is_pinned()


def test_memory_is_accounted_by_device() -> None:
    before = torch.gcu.memory_allocated(4), torch.gcu.memory_allocated(5)
    torch.gcu.reset_peak_memory_stats(4)
    tensor = torch.empty(1000, device='gcu:4')
    assert torch.gcu.memory_allocated(4) == before[0] + 4000
    twice = tensor + tensor
    assert torch.gcu.memory_allocated(4) == before[0] + 8000
    del tensor, twice
    assert torch.gcu.memory_allocated(4) == before[0]
    assert torch.gcu.max_memory_allocated(4) == before[0] + 8000
    assert torch.gcu.memory_allocated(5) == before[1]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 8, 2, stride=2, groups=2),
        nn.GELU(),
        nn.Dropout2d(0.3),
        nn.Upsample(scale_factor=2, mode='bilinear', align_corners=False),
        nn.Conv2d(8, 4, 1),
    )


@pytest.mark.parametrize('amp', [False, True])
def test_training_gives_the_cpus_numbers(amp: bool) -> None:
    losses = []
    for device in ('cpu', 'gcu:6'):
        model = net().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(1)
        curve = []
        for _ in range(4):
            images = torch.randn(2, 3, 16, 16, device=device)
            labels = torch.randint(0, 4, (2, 32, 32), device=device)
            with torch.autocast(device.split(':')[0], dtype=torch.bfloat16, enabled=amp):
                logits = model(images)
            loss = F.cross_entropy(logits.float(), labels, ignore_index=3)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            curve.append(loss.item())
        losses.append(curve)
    assert losses[1] == pytest.approx(losses[0], rel=2e-2 if amp else 1e-6)


def test_attention_trains() -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 9, 8)
    grads = []
    for device in ('cpu', 'gcu:1'):
        leaf = query.clone().to(device).requires_grad_()
        F.scaled_dot_product_attention(leaf, leaf, leaf).pow(2).sum().backward()
        grads.append(leaf.grad.cpu())
    assert torch.allclose(*grads, atol=1e-5)


def test_copies_pickles_and_checkpoints() -> None:
    model = net().to('gcu:2')
    twin = copy.deepcopy(model)
    assert all(p.device == torch.device('gcu:2') for p in twin.parameters())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for where, expected in (('cpu', 'cpu'), (None, 'gcu:2'), ('gcu:3', 'gcu:3')):
        file.seek(0)
        state = torch.load(file, map_location=where)
        assert all(tensor.device == torch.device(expected) for tensor in state.values())
        assert torch.equal(state['0.weight'].cpu(), model[0].weight.cpu())


def test_a_full_device_is_an_out_of_memory_error(tmp_path: Path) -> None:
    done = run_python(
        """
kept = torch.empty(12 * 2**20, dtype=torch.uint8, device='gcu:1')
other = torch.empty(12 * 2**20, dtype=torch.uint8, device='gcu:2')
try:
    torch.empty(8 * 2**20, dtype=torch.uint8, device='gcu:1')
except torch.OutOfMemoryError as error:
    print(error)
del kept
torch.empty(8 * 2**20, dtype=torch.uint8, device='gcu:1')
print('fits', sim.memory_total(), torch.gcu.mem_get_info(2))
""",
        tmp_path,
        MAPSAGE_SIM_MEMORY='16M',
    )
    assert done.returncode == 0, done.stdout
    assert (
        'GCU out of memory. Tried to allocate 8.00 MiB. gcu:1 has a total capacity of 16.00'
        in done.stdout
    )
    assert f'fits {2**24} ({2**22}, {2**24})' in done.stdout


def test_faults_on_request(tmp_path: Path) -> None:
    done = run_python(
        """
for number in (1, 2, 3):
    try:
        torch.empty(4, device='gcu:0')
        print(number, 'fits')
    except torch.OutOfMemoryError as error:
        print(number, error)
for use in (lambda: torch.empty(1, device='gcu:3'), lambda: torch.ones(1).to('gcu:3'),
            lambda: torch.gcu.set_device(3), lambda: sim.set_device(3),
            lambda: torch.empty(1, device='gcu:9')):
    try:
        use()
        print('used')
    except (RuntimeError, ValueError) as error:
        print(type(error).__name__, error)
""",
        tmp_path,
        MAPSAGE_SIM_FAULTS='allocation=2,absent=3',
    )
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == '1 fits' and 'MAPSAGE_SIM_FAULTS' in lines[1] and lines[2] == '3 fits'
    for line in lines[3:7]:
        assert 'gcu:3 does not answer' in line
    assert lines[6].startswith('AcceleratorError')
    assert 'gcu:9 does not exist' in done.stdout


def test_strictness_refuses_what_the_card_cannot_do(tmp_path: Path) -> None:
    done = run_python(
        """
import torch.nn.functional as F
def attempt(name, call):
    try:
        call()
        print(name, 'ran')
    except RuntimeError as error:
        print(name, 'refused:', error)
double = torch.ones(2, dtype=torch.float64).to('gcu:0')
attempt('moving float64', lambda: double[1:].clone().cpu())
attempt('float64', lambda: double + 1)
wide = torch.tensor([2**31 - 1], device='gcu:0')
attempt('narrow int64', lambda: wide - 1)
attempt('wide int64', lambda: wide + 1)
attempt('wide copy', lambda: torch.tensor([2**40]).to('gcu:0'))
attempt('batch norm', lambda: torch.nn.BatchNorm2d(2).to('gcu:0')(torch.ones(2, 2, 2, 2).gcu(0)))
attempt('labels', lambda: F.cross_entropy(torch.ones(2, 3).gcu(0), torch.tensor([0, 1]).gcu(0)))
attempt('sync_bn', lambda: torch.batch_norm_stats(torch.ones(2, 2, 2).gcu(0), 1e-5))
attempt('relu', lambda: F.relu(torch.ones(2).gcu(0)))
""",
        tmp_path,
        MAPSAGE_SIM_STRICT='float64,int64,sync_bn,aten::relu',
    )
    assert done.returncode == 0, done.stdout
    found = {
        line.split(' refused:')[0].rsplit(' ran')[0]: 'refused' in line
        for line in done.stdout.splitlines()
        if line.endswith(' ran') or ' refused:' in line
    }
    assert found == {
        'moving float64': False,
        'float64': True,
        'narrow int64': False,
        'wide int64': True,
        'wide copy': True,
        'batch norm': False,
        'labels': False,
        'sync_bn': True,
        'relu': True,
    }, done.stdout
    assert '2147483648' in done.stdout and 'MAPSAGE_SIM_STRICT' in done.stdout
    assert 'TOPSATEN_STATUS_NOT_SUPPORT!\ntopsatenRelu (aten::relu): has no kernel' in done.stdout


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path) -> None:
    done = run_python('', tmp_path, CXX='no-such-compiler', XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode != 0
    assert 'no C++ compiler' in done.stdout and 'g++' in done.stdout


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    compiler = tmp_path / 'broken-c++'
    compiler.write_text('#!/bin/sh\necho "no such standard: c++20"; exit 1\n')
    compiler.chmod(0o755)
    done = run_python('', tmp_path, CXX=str(compiler), XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode != 0
    assert 'no such standard: c++20' in done.stdout and 'CXX' in done.stdout
    assert not list((tmp_path / 'mapsage' / 'simulator').glob('*.so'))


# Both ranks ask at the same moment, the compiler takes a second, and what it gives is the library
# that this process has loaded: a compilation takes half a minute, and loading it has tested one.
TOGETHER = """
import os, time
open(f'{os.environ["RANK"]}.asks', 'w').close()
while not os.path.exists(f'{1 - int(os.environ["RANK"])}.asks'):
    time.sleep(0.01)
from mapsage.accelerator import resolve_accelerator
print('devices', resolve_accelerator('sim').device_count())
"""


def test_ranks_that_start_together_compile_once(tmp_path: Path) -> None:
    compiler, script = tmp_path / 'slow-c++', tmp_path / 'script.py'
    compiler.write_text(
        '#!/bin/sh\nsleep 1\nwhile [ "$1" != -o ]; do shift; done\n'
        f'exec cp "{library_path()}" "$2"\n'
    )
    compiler.chmod(0o755)
    script.write_text(TOGETHER)
    environ = {
        **os.environ,
        'PYTHONPATH': str(ROOT),
        'XDG_CACHE_HOME': str(tmp_path),
        'CXX': str(compiler),
    }
    ranks = [
        subprocess.Popen(
            [warm_python(), str(script)],
            cwd=str(tmp_path),
            env={**environ, 'RANK': str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
        )
        for rank in range(2)
    ]
    said = ''.join(process.communicate(timeout=300)[0] for process in ranks)
    assert said.count('devices 8') == 2, said
    assert said.count('compiling the backend') == 1, said


def test_a_real_backend_in_its_place_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('mapsage.extras.simulator.load._loaded', None)
    reason = simulator.why_unavailable()
    assert reason is not None and "'gcu' is loaded" in reason
    with pytest.raises(SimulatorError, match="'gcu' is loaded"):
        simulator.load_simulator()


STREAMS = """
def draw(index):
    return torch.nn.functional.dropout(torch.ones(16, device=f'gcu:{index}'), 0.5).cpu().tolist()

torch.manual_seed(3)
assert draw(0) == draw(1), 'equal seeds'
draw(1)
host = torch.rand(3)
with torch.gcu.device(1):
    torch.gcu.manual_seed(4)
    assert torch.gcu.initial_seed() == 4
torch.manual_seed(3)
assert torch.equal(torch.rand(3), host), 'cards do not draw from the CPU'
torch.manual_seed(3)
torch.default_generator.manual_seed(9)
with torch.gcu.device(0):
    torch.gcu.manual_seed(5)
assert draw(0) != draw(1)
state = torch.gcu.get_rng_state(1)
assert state.numel() == sim.settings.profile.rng_state_bytes == 16
seed, offset = state.view(torch.int64).tolist()
assert seed == 3 and offset > 0 and offset % 4 == 0, (seed, offset)
first = [draw(1), draw(0)]
torch.gcu.set_rng_state(state, 1)
assert [draw(1)] == first[:1] and draw(0) != first[1]
assert (torch.randn(2, 3, device='gcu:1') != 0).all()
try:
    torch.gcu.set_rng_state(torch.zeros(3, dtype=torch.uint8), 1)
except RuntimeError as error:
    assert 'got 3' in str(error)
try:
    torch.gcu.set_rng_state(torch.tensor([3, 6]).view(torch.uint8), 1)
except RuntimeError as error:
    assert 'offset must be a multiple of 4' in str(error)
    print('held')
"""


FORK = """
import os
def child(name):
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        assert name == 'unused' or torch.gcu._is_in_bad_fork() and not torch.gcu.is_initialized()
        torch.manual_seed(3)
        print(name, torch.ones(2, device='gcu:1').sum().item(), flush=True)
    except RuntimeError as error:
        print(name, error, flush=True)
    os._exit(0)

torch.gcu.is_available(), torch.gcu.device_count(), torch.manual_seed(3)
assert not torch.gcu.is_initialized()
child('unused')
torch.ones(1, device='gcu:0')
assert torch.gcu.is_initialized() and not torch.gcu._is_in_bad_fork()
child('used')
"""


def test_a_fork_of_a_process_that_used_a_device_cannot(tmp_path: Path) -> None:
    done = run_python(FORK, tmp_path)
    assert 'unused 2.0\n' in done.stdout, done.stdout
    assert (
        'used Cannot re-initialize GCU in forked subprocess. To use GCU with multiprocessing, '
        "you must use the 'spawn' start method" in done.stdout
    ), done.stdout


def test_devices_with_generators_of_their_own(tmp_path: Path) -> None:
    done = run_python(STREAMS, tmp_path, MAPSAGE_SIM_RANDOM='device')
    assert done.stdout.strip().endswith('held'), done.stdout


def test_devices_with_the_generator_of_the_cpu() -> None:
    torch.manual_seed(3)
    here = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4, device='gcu:3').cpu(), here)
    state = torch.gcu.get_rng_state(2)
    assert torch.equal(state, torch.default_generator.get_state())
    torch.rand(1)
    torch.gcu.set_rng_state(state, 5)
    assert torch.equal(torch.default_generator.get_state(), state)
