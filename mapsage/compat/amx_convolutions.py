"""Convolve in bfloat16 on a CPU with AMX as on other CPUs.

Gap: on processors with AMX (Intel Xeon from the fourth generation), oneDNN 3.12 of torch 2.13 and
2.14 gives wrong results without an error for bfloat16 convolutions with large kernels and strides,
such as the patch embedding of a ViT with few bands (pytorch/pytorch#169688). A map predicted with
``--amp`` is noise there.
Remove when: `tests/unit/compat/test_amx_convolutions.py` passes without :func:`apply` on such a
processor with the oldest torch of the main leg.
"""

from __future__ import annotations

import os


def apply() -> None:
    """Let oneDNN use AVX-512 at most, unless the user has chosen; it looks at its first use."""
    os.environ.setdefault('ONEDNN_MAX_CPU_ISA', 'AVX512_CORE_BF16')
