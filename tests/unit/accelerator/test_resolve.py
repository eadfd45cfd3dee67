"""Which accelerator is chosen, and what is said about the others: each in a separate process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Callable

import pytest
from warm_python import warm_python

from mapsage.accelerator import (
    ACCELERATORS,
    AcceleratorError,
    current_accelerator,
    resolve_accelerator,
    set_current_accelerator,
)

ROOT = Path(__file__).resolve().parents[3]

S60 = """
import types, torch
torch.gcu = types.ModuleType('torch.gcu')
torch.gcu.device_count = lambda: {devices}
torch.gcu.set_device = lambda index: None
def device_count():
    return {devices}
"""
T20 = """
import torch
def device_count():
    return {devices}
def gcu_device(index):
    return torch.device('cpu', index)
"""
BROKEN = "raise OSError('libtopsrt.so.3: cannot open shared object file')"
BROKEN_LATER = """
import types, torch
torch.gcu = types.ModuleType('torch.gcu')
def device_count():
    raise RuntimeError('efdrv: driver version is insufficient')
torch.gcu.device_count = device_count
gcu_device = None
"""
SAY = """
import traceback
from mapsage.accelerator import *
for name in ('auto', 'gcu', 'gcu_t20', 'xla', 'cpu'):
    print('asked for', name)
    try:
        chosen = resolve_accelerator(name)
        print('chose', chosen.name)
        print(explain(chosen, name))
    except AcceleratorError as error:
        print('AcceleratorError:', error)
    except Exception:
        traceback.print_exc()
"""


@pytest.fixture(scope='module')
def say(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function: what a process with a fake vendor package says about a name.

    The process has imported nothing before where importing mapsage next to a broken package is
    tested, and where torch may have loaded the real package on its own.
    """

    @functools.lru_cache(maxsize=None)
    def all_names(vendor: str, package: str) -> str:
        folder = tmp_path_factory.mktemp('vendor')
        if vendor:
            (folder / package).mkdir()
            (folder / package / '__init__.py').write_text(vendor)
        script = folder / 'say.py'
        script.write_text(SAY)
        fresh = vendor == BROKEN or package == 'torch_xla'
        return subprocess.run(
            [sys.executable if fresh else warm_python(), str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=str(ROOT),
            universal_newlines=True,
            timeout=200,
            env={
                **os.environ,
                'PYTHONPATH': f'{folder}:{ROOT}',
                'CUDA_VISIBLE_DEVICES': '',
                'PJRT_DEVICE': 'CPU',
            },
        ).stdout

    def one_name(name: str, vendor: str = '', package: str = 'torch_gcu') -> str:
        parts = all_names(vendor, package).split('asked for ')
        return next(part for part in parts if part.startswith(f'{name}\n'))

    return one_name


@pytest.mark.parametrize(
    'name, vendor, words',
    [
        ('gcu', S60.format(devices=8), ['chose gcu', 'gcu (8 device(s), gradients over eccl)']),
        ('gcu', S60.format(devices=0), ['torch_gcu is installed and shows no device']),
        ('gcu', T20.format(devices=8), ['torch_gcu is the T20 line: use accelerator=gcu_t20']),
        ('gcu_t20', T20.format(devices=8), ['chose gcu_t20', 'chosen by name']),
        ('gcu_t20', T20.format(devices=0), ['torch_gcu is installed and shows no device']),
        ('gcu_t20', S60.format(devices=8), ['torch_gcu is the S60 line: use accelerator=gcu']),
        ('auto', S60.format(devices=2), ['chose gcu\n']),
        ('auto', T20.format(devices=2), ['chose gcu_t20\n', 'gcu: torch_gcu is the T20 line']),
        ('cpu', S60.format(devices=2), ['chose cpu', 'chosen by name']),
        ('gcu', BROKEN, ['AcceleratorError', 'libtopsrt.so.3: cannot open', 'accelerator=cpu']),
        ('auto', BROKEN, ['AcceleratorError', 'libtopsrt.so.3: cannot open']),
        ('cpu', BROKEN, ['chose cpu', 'chosen by name']),
        ('gcu', BROKEN_LATER, ['AcceleratorError:', 'driver version is insufficient']),
        ('auto', BROKEN_LATER, ['AcceleratorError:', 'driver version is insufficient']),
        ('cpu', BROKEN_LATER, ['chose cpu', 'chosen by name']),
    ],
)
def test_torch_gcu(name: str, vendor: str, words: list, say: Callable[..., str]) -> None:
    said = say(name, vendor)
    assert all(word in said for word in words) and 'Traceback' not in said, said


@pytest.mark.parametrize(
    'name, words',
    [
        ('xla', ['AcceleratorError', 'undefined symbol: _ZN5torch3xla']),
        ('cpu', ['chose cpu', 'chosen by name']),
    ],
)
def test_broken_torch_xla(name: str, words: list, say: Callable[..., str]) -> None:
    said = say(name, "raise ImportError('undefined symbol: _ZN5torch3xla')", 'torch_xla')
    assert all(word in said for word in words) and 'Traceback' not in said, said


def test_xla_on_the_cpu_is_taken_by_name_only(say: Callable[..., str]) -> None:
    pytest.importorskip('torch_xla', reason='the xla leg runs this')
    assert 'chose xla' in say('xla')
    said = say('auto')
    assert 'chose cpu' in said and 'xla: its PJRT platform is CPU' in said


def test_every_absent_accelerator_gives_its_reason() -> None:
    for kind in ACCELERATORS:
        reason = kind.why_unavailable()
        if reason is None:
            assert resolve_accelerator(kind.name).name == kind.name
            continue
        with pytest.raises(AcceleratorError) as caught:
            resolve_accelerator(kind.name)
        for word in (repr(kind.name), reason, 'Present: ', 'cpu'):
            assert word in str(caught.value)


def test_unknown_name() -> None:
    with pytest.raises(AcceleratorError, match="'tpu': expected auto, cuda, gcu, .*, cpu"):
        resolve_accelerator('tpu')


def test_auto_looks_in_the_documented_order() -> None:
    assert [kind.name for kind in ACCELERATORS] == [
        'cuda',
        'gcu',
        'gcu_t20',
        'xla',
        'plugin',
        'cpu',
        'sim',
    ]


def test_the_one_in_force() -> None:
    cpu = set_current_accelerator(resolve_accelerator('cpu'))
    assert current_accelerator() is cpu
