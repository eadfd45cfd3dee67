"""A group norm trains on channels-last maps that need no gradient, in a separate process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import mapsage  # noqa: F401

_STEP = """
import torch, mapsage
maps = torch.randn(2, 16, 8, 8).contiguous(memory_format=torch.channels_last)
torch.nn.GroupNorm(4, 16)(maps).sum().backward()
"""


@pytest.mark.long
def test_the_process_survives_the_backward_pass() -> None:
    finished = subprocess.run([sys.executable, '-c', _STEP], capture_output=True, check=False)
    assert finished.returncode == 0, finished.stderr.decode()[-2000:]


def test_a_group_norm_can_be_scripted() -> None:
    maps = torch.randn(2, 16, 4, 4)
    norm = nn.GroupNorm(4, 16)
    assert torch.equal(torch.jit.script(norm)(maps), norm(maps))
