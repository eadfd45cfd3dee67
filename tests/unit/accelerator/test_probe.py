"""What a device computes is tried on it: simulated cards that refuse some of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Dict, List

import pytest
import torch
from support import main_leg, why_no_make
from warm_python import warm_python

from mapsage.accelerator.private_use1 import has_kernel

pytestmark = [main_leg, pytest.mark.skipif(bool(why_no_make()), reason=why_no_make())]

PROBE = """
import torch
from mapsage.accelerator import resolve_accelerator
from mapsage.accelerator.private_use1 import probe_device
state = torch.get_rng_state()
resolve_accelerator('sim')
{kernel}
tried = probe_device(torch.device('gcu', 1))
assert torch.equal(state, torch.get_rng_state())
print(tried.summary(), tried.supports.compile, sep=', ')
"""
# A card that keeps 64-bit numbers.
WHOLE = """
from dataclasses import replace
from mapsage.extras.simulator.devices import library, settings
from mapsage.extras.simulator.load import set_profile
set_profile(library(), replace(settings().profile, int64_wraps=False, float64_narrows=False))
"""
# A plugin's kernel that does nothing.
WRONG_LISTS = (
    WHOLE
    + """
library = torch.library.Library('aten', 'IMPL')
library.impl('_foreach_addcdiv_.ScalarList', lambda *arguments: None, 'PrivateUse1')
"""
)


@pytest.mark.parametrize(
    'strict, kernel, refused',
    [
        ('', WHOLE, []),
        ('float64', WHOLE, ['float64']),
        ('int64', WHOLE, ['int64']),
        ('', '', ['int64', 'float64']),
        ('aten::mm', WHOLE, ['bfloat16']),
        ('', WRONG_LISTS, ['foreach optimizers']),
    ],
)
def test_what_a_card_refuses(strict: str, kernel: str, refused: List[str], tmp_path: Path) -> None:
    script = tmp_path / 'probe.py'
    script.write_text(PROBE.format(kernel=kernel))
    environ: Dict[str, str] = {**os.environ, 'MAPSAGE_SIM_STRICT': strict}
    said = subprocess.run(
        [warm_python(), str(script)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        timeout=120,
    ).stdout
    answers = dict(each.rsplit(' ', 1) for each in said.splitlines()[-1].split(', ')[:-1])
    # The simulator's fallback for all operators does not count as kernels.
    never = ['SyncBN', 'fused optimizers']
    assert [
        name for name, answer in answers.items() if answer == 'no' and name not in never
    ] == refused, said
    assert [answers[name] for name in never] == ['no', 'no'] and said.strip().endswith('False')


def test_kernels_of_a_plugin() -> None:
    torch.zeros(1)
    assert not has_kernel('batch_norm_stats') and not has_kernel('there_is_no_such_operator')
