"""Enflame GCU, S60 line (TopsRider 3.x): eager devices ``gcu:N``, PrivateUse1 renamed.

It is written against the source of torch_gcu 2.10. It has been run on simulated devices (sim.py),
not on a real GCU. Only what differs from other plugins is here, the rest is in `private_use1.py`.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Mapping, Optional

import torch

from ._vendor import DeviceModule, import_vendor
from .base import Supports
from .private_use1 import PrivateUse1Accelerator

# Keeps int64 whole on a card, which has no kernels for it, and eccl counts 4 bytes for each number
# (torch_gcu 2.10, gcu_hardware.h:42, ProcessGroupECCL.cpp:68; flagos-ai/vllm-plugin-FL#532). What
# torch_gcu 2.11 does with it is not published.
INT64_VARIABLE = 'TORCH_GCU_ENABLE_INT64_AND_UINT64'
_INT64_UNKNOWN_FROM = (2, 11)


class GcuAccelerator(PrivateUse1Accelerator):
    """S60 devices; gradients over eccl, control traffic over gloo.

    The vendor keeps 64-bit numbers in 32 bits unless ``TORCH_GCU_ENABLE_INT64_AND_UINT64`` is set,
    and has no kernels of SyncBN. Its fused optimizers are registered, and compute on the CPU
    (torch_gcu 2.10 ``gcu_op_fallback.yaml``).
    """

    name = 'gcu'
    device_type = 'gcu'
    communication = 'eccl'
    # ECCLUtils.hpp:220-246 of torch_gcu 2.10: checking for errors always answers success.
    silent_backend = True
    # It narrows them, moves the first half of their bytes, or refuses to add them, by its version.
    collectives_of_64_bits = False
    # torch_gcu 2.10, gcu_op_fallback.yaml
    native_bincount = False
    amp_dtype = torch.bfloat16
    masks = ('TOPS_VISIBLE_DEVICES',)

    # The devices are torch_gcu's or simulated ones, so no plugin is looked for.
    def __init__(self) -> None:
        pass

    @classmethod
    def why_unavailable(cls) -> Optional[str]:
        vendor = import_vendor('torch_gcu')
        # `torch.gcu` without the module belongs to the simulator.
        if vendor is None:
            return 'torch_gcu is not installed'
        if not hasattr(torch, 'gcu'):
            return 'torch_gcu is the T20 line: use accelerator=gcu_t20'
        if DeviceModule('gcu', 'torch_gcu').device_count() < 1:
            return 'torch_gcu is installed and shows no device (see `efsmi`)'
        return None

    def environment_problem(self, environ: Mapping[str, str]) -> Optional[str]:
        value = environ.get(INT64_VARIABLE, '')
        # As torch_gcu reads a switch.
        number = re.match(r'\s*[+-]?(\d+)', value)
        if value != 'true' and (number is None or int(number.group(1)) == 0):
            return None
        version = self.software().get('torch_gcu', '')
        release = re.match(r'(\d+)\.(\d+)', version)
        if release is not None and tuple(map(int, release.groups())) >= _INT64_UNKNOWN_FROM:
            return None
        return int64_problem(f'{INT64_VARIABLE}={value}', f'torch_gcu {version}')

    @functools.cached_property
    def supports(self) -> Supports:  # type: ignore[override]
        """Capabilities of the current card, tried at the first use."""
        return replace(self.capabilities.supports, fused_optimizer=False)


def int64_problem(setting: str, software: str) -> str:
    """Return the error of a run with whole int64 numbers on the cards.

    Args:
        setting: The variable and its value.
        software: Name and version of the software that reads it.
    """
    return (
        f'{setting}: with it {software} keeps int64 in 64 bits on the card, where it has no '
        f'kernels for adding them (BatchNorm counts its batches so), and eccl moves the first '
        f'half of their bytes, so that ranks start with different weights. Unset the variable '
        f'(unset {setting.split("=")[0]}) and start again; without it, int64 is kept in 32 '
        f'bits, which labels and indices fit.'
    )
