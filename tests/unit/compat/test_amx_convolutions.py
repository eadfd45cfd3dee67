"""Convolutions in bfloat16 are right on every CPU; wrong ones were seen on one with AMX."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from support import main_leg
from torch.nn import functional

from mapsage.compat import amx_convolutions

pytestmark = main_leg


@pytest.mark.parametrize(
    'bands, side, size',
    [(6, 64, 16), (13, 64, 16), (3, 64, 16), (3, 224, 16), (10, 64, 8), (6, 56, 14), (3, 64, 4)],
)
def test_patches_are_embedded_as_in_float32(bands: int, side: int, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, bands, side, side, generator=generator).bfloat16()
    weights = torch.randn(48, bands, size, size, generator=generator).bfloat16()
    expected = functional.conv2d(images.float(), weights.float(), stride=size)
    found = functional.conv2d(images, weights, stride=size).float()
    # Half a step of bfloat16 is 1/512 of a value; its sums are in float32.
    assert (found - expected).abs().max() < 0.01 * expected.abs().max()


def test_a_users_choice_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('ONEDNN_MAX_CPU_ISA', 'AVX2')
    amx_convolutions.apply()
    assert (
        subprocess.check_output(
            [sys.executable, '-c', 'import os; print(os.environ["ONEDNN_MAX_CPU_ISA"])'], text=True
        )
        == 'AVX2\n'
    )
