"""Simulated devices and CUDA exclude each other in a process, and say so before a backward pass."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support import ROOT, launch

# A thread of PyTorch's engine that frees a graph while the interpreter ends may abort the process
# (torch 2.14, Python 3.11), hence END.
BEGIN = """
import os, sys
import torch
from mapsage.accelerator import AcceleratorError, resolve_accelerator

def backward(device):
    numbers = torch.ones(3, device=device, requires_grad=True)
    (numbers * 2).sum().backward()
    assert numbers.grad.tolist() == [2.0] * 3

"""
END = """
sys.stdout.flush()
os._exit(0)
"""
SIMULATOR_SECOND = (
    BEGIN
    + """
backward('cuda')
try:
    resolve_accelerator('sim')
except AcceleratorError as error:
    print(error)
backward('cuda')
"""
)
CUDA_SECOND = (
    BEGIN
    + """
resolve_accelerator('sim')
backward('gcu')
try:
    resolve_accelerator('cuda')
except AcceleratorError as error:
    print(error)
print('auto:', resolve_accelerator('auto').name)
"""
)
WHY = "PyTorch's backward pass fails on CUDA once simulated devices are loaded"


@pytest.mark.parametrize(
    'script, messages',
    [
        (SIMULATOR_SECOND, ['CUDA is in use in this process', WHY]),
        (
            CUDA_SECOND,
            [
                "accelerator 'cuda' cannot be used here: simulated devices are loaded",
                WHY,
                'Present: cpu, sim',
                'auto: cpu',
            ],
        ),
    ],
)
def test_the_second_is_refused(script: str, messages: list, tmp_path: Path) -> None:
    (tmp_path / 'script.py').write_text(script + END)
    finished = launch(
        command=[sys.executable, str(tmp_path / 'script.py')],
        cold=True,
        environ={'PYTHONPATH': str(ROOT)},
    )
    assert finished.status == 0, finished.output
    for message in messages:
        assert message in finished.output
