"""What the vendor's software does otherwise than a CPU, by its version.

A profile describes one version of torch_gcu with its environment; each field is a quirk, with the
evidence for it. Nobody has run this code on a real card. ``backend.cpp`` and ``device_module.py``
imitate the quirks of a card, ``mapsage/extras/simulator/simulated_eccl.py`` imitates the quirks
of ``eccl``, and docs/reference/simulator.md has the table of all quirks.

Evidence is quoted as file:line of torch_gcu 2.10.0 (github.com/sunnygui-L/torch-gcu, commit
e63ff28, paths under torch_gcu/), as ``owner/repository#number`` for an issue or pull request, or
by the name of the vendor's document.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Any, Mapping, Tuple

from mapsage.accelerator.gcu import INT64_VARIABLE


class Wire64(enum.Enum):
    """What ``eccl`` does with tensors of int64 and float64.

    Attributes:
        NARROWED: Every collective sends int32 and float32.
        FIRST_HALF: As NARROWED for float64. Of int64 tensors only the first half of the bytes is
            sent, because the elements are counted with 4 bytes each; the rest stays as it was.
        REDUCTIONS_REFUSED: Reductions (all_reduce, reduce, reduce_scatter) raise ``DistBackendError
            ... ecclInvalidArgument``. Other collectives send all bytes.
    """

    NARROWED = 'A'
    FIRST_HALF = 'B'
    REDUCTIONS_REFUSED = 'C'


def _quirk(value: Any, row: int, evidence: str) -> Any:
    """Return a dataclass field with its row of docs/reference/simulator.md and its evidence."""
    return field(default=value, metadata={'row': row, 'evidence': evidence})


@dataclass(frozen=True)
class GcuProfile:
    """Quirks of one version of the vendor's software.

    Attributes:
        name: Value of ``MAPSAGE_SIM_GCU``.
        software: Versions and variables that the profile stands for.
        int64_wraps: Whether a card keeps 64-bit integers in 32 bits: copies and kernels wrap them,
            ``fill_`` clamps. A warning says so once.
        float64_narrows: Whether a card keeps 64-bit floats in 32 bits, in which large ones are
            infinite. A warning says so once.
        int64_arithmetic: Whether a card has kernels for the arithmetic of int64 tensors.
        mixed_precision_sum: Whether ``sum(dtype=...)`` accepts another data type than its input's.
        max_of_nan_is_nan: Whether ``max`` and ``min`` of values with a NaN are NaN.
        dtype_views: Whether ``Tensor.view(dtype)`` works on a card.
        uuid_in_properties: Whether ``get_device_properties`` has the card's ``uuid``.
        rng_state_bytes: Size of ``torch.gcu.get_rng_state()``: a seed and an offset that is a
            multiple of 4 (with ``MAPSAGE_SIM_RANDOM=device``).
        usable_after_fork: Whether a forked process can use the cards if its parent has.
        scaler_prints_overflow: Whether ``torch.gcu.amp.GradScaler`` prints a line on overflow.
        wire_64: What ``eccl`` does with 64-bit tensors.
        collectives_asynchronous: Whether a collective returns before its result is there.
        timeout_aborts: Whether a collective that does not complete ends the process by SIGABRT,
            from a thread, instead of raising an error.
        lost_rank_is_reported: Whether a collective fails at once when the process of another rank
            has ended, rather than after the timeout.
        destroy_may_abort: Whether ``destroy_process_group`` may end the process.
        contiguous_only: Whether collectives refuse tensors that are not contiguous.
        unmapped_dtypes: Names of the data types that no collective accepts.
        bitwise_reductions: Whether BAND, BOR and BXOR work. SUM of bool tensors is MAX, and AVG of
            them is refused.
        barrier_uses_card: Whether a barrier is an all_reduce on card ``rank % device_count``.
        sends_and_receives: Whether ``send`` and ``recv`` of card tensors work, pair by pair.
        gather_fills_outputs: Whether ``gather`` and ``scatter`` write their outputs.
        any_current_card: Whether a collective works while another card than the tensor's is the
            current one.
    """

    name: str
    software: str

    # ------------------------------------------------------------------ a card
    int64_wraps: bool = _quirk(
        True,
        3,
        'csrc/aten/aot_ops/gcu_copy.cpp:330-350, gcu_tensor_factories.cpp:18-104; '
        'csrc/gcu/gcu_utils.h:19-37, gcu_hardware.h:42',
    )
    float64_narrows: bool = _quirk(True, 3, 'csrc/gcu/gcu_hardware.h:42, also with the variable')
    int64_arithmetic: bool = _quirk(
        True, 4, 'flagos-ai/vllm-plugin-FL#532: topsatenAdd NOT_SUPPORT with the variable set'
    )
    mixed_precision_sum: bool = _quirk(False, 7, "operator list in the vendor's documents")
    max_of_nan_is_nan: bool = _quirk(False, 8, "operator list in the vendor's documents")
    dtype_views: bool = _quirk(
        False, 31, "operator list and user guide (known issue 2) in the vendor's documents"
    )
    uuid_in_properties: bool = _quirk(False, 20, 'csrc/python/gcu_module.cpp:784-804')
    rng_state_bytes: int = _quirk(16, 25, 'GCUGeneratorImpl: uint64 seed, int64 offset, % 4 == 0')
    usable_after_fork: bool = _quirk(False, 26, 'gcu/__init__.py:177')
    scaler_prints_overflow: bool = _quirk(True, 29, 'gcu/amp/grad_scaler.py:283')

    # ------------------------------------------------------------------ eccl
    wire_64: Wire64 = _quirk(
        Wire64.NARROWED,
        1,
        'csrc/distributed/ProcessGroupECCL.cpp:62-72 maps kLong and kDouble to '
        'ecclInt32 and ecclFloat32',
    )
    collectives_asynchronous: bool = _quirk(
        True, 10, 'csrc/distributed/ProcessGroupECCL.cpp: wait() holds the stream, not the host'
    )
    timeout_aborts: bool = _quirk(
        True, 11, 'csrc/distributed/ProcessGroupECCL.cpp: watchdog, ASYNC_ERROR_HANDLING=3'
    )
    lost_rank_is_reported: bool = _quirk(
        False, 12, 'csrc/distributed/ECCLUtils.hpp:220-246: checkForEcclError answers success'
    )
    destroy_may_abort: bool = _quirk(
        True, 13, 'csrc/distributed/ProcessGroupECCL.cpp:1788, C10D_ECCL_ASSERT'
    )
    contiguous_only: bool = _quirk(True, 14, 'csrc/distributed/ProcessGroupECCL.cpp:2049')
    unmapped_dtypes: Tuple[str, ...] = _quirk(
        ('int16', 'uint16', 'uint32', 'complex128'),
        15,
        'csrc/distributed/ProcessGroupECCL.cpp:62-72',
    )
    bitwise_reductions: bool = _quirk(False, 16, 'csrc/distributed/ProcessGroupECCL.cpp')
    barrier_uses_card: bool = _quirk(True, 17, 'csrc/distributed/ProcessGroupECCL.cpp:3481-3510')
    sends_and_receives: bool = _quirk(True, 18, 'csrc/distributed/ProcessGroupECCL.cpp')
    gather_fills_outputs: bool = _quirk(
        False,
        19,
        'flagos-ai/FlagCX#554, with the ecclGather of FlagCX; torch_gcu does not check '
        'the return codes of its group of sends',
    )
    any_current_card: bool = _quirk(
        False, 30, 'flagos-ai/Torch-FL commit 1adbc97: such a collective does nothing'
    )


_PUBLIC = GcuProfile('2.10', f'torch_gcu 2.10.0 of TopsRider 3.7, {INT64_VARIABLE} not set')

PROFILES: Mapping[str, GcuProfile] = {
    profile.name: profile
    for profile in (
        _PUBLIC,
        # The switch turns the narrowing of int64 off and leaves the kernels and the static type map of
        # eccl as they are (gcu_hardware.h:42, ProcessGroupECCL.cpp:68). FlagOS images set it
        # (flagos-ai/FlagGems commit ed2508b, backends.yaml:139,160).
        replace(
            _PUBLIC,
            name='2.10-int64',
            software=f'torch_gcu 2.10.0, {INT64_VARIABLE}=1',
            int64_wraps=False,
            int64_arithmetic=False,
            wire_64=Wire64.FIRST_HALF,
        ),
        # The source of 2.11 is not public. flagos-ai/Megatron-LM-FL#170 and #131 describe how it treats
        # 64-bit reductions. Everything else is taken over from 2.10, also that int64 is narrowed on a
        # card, because no thread says what 2.11 does without the variable.
        replace(
            _PUBLIC,
            name='2.11',
            software='torch_gcu 2.11.0+3.8.20260713 with ECCL 3.6.3.11',
            wire_64=Wire64.REDUCTIONS_REFUSED,
        ),
    )
}

# The newest version with public source. Of 2.11 a few threads are known.
DEFAULT = '2.10'
