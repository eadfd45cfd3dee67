"""What operators on the CPU cost a step: an estimate, and the sentence that the user reads.

The share of FLOPs is not all: a transformer that is trained as a whole has few of its FLOPs on the
CPU, but sends the activations of every layer there and back for GELU's gradient. So the time of
each call is estimated by a roofline (Williams, Waterman and Patterson 2009): a call takes as long
as its products or its bytes, whichever is longer, and on the CPU also the transfer there and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List

from .placement import OperatorLocations, OperatorPlace, Placement
from .recording import OperatorUse, Recording

# A machine of the class of an S60 server, in round numbers; an assumption and no measurement.
# Operations per second in float32, bytes per second of memory and of PCIe 4.0 x16 (80 % of its 32
# GB/s), and seconds to start a kernel, or to synchronize and call the CPU instead.
_CARD_FLOPS, _CARD_BANDWIDTH, _CARD_CALL = 20e12, 500e9, 10e-6
_CPU_FLOPS, _CPU_BANDWIDTH, _CPU_CALL = 1e12, 100e9, 10e-6
_LINK_BANDWIDTH, _LINK_CALL = 25e9, 40e-6
# A step is at a useful speed if it takes at most this many times as long as on the card only, and
# the CPU computes at most this share of its FLOPs. The share hardly depends on the size of images,
# and with 5 % a CPU at a twentieth of the card's speed doubles the time.
_USEFUL_SLOWDOWN, _USEFUL_SHARE = 2.0, 0.05
# Below this many times the CPU's speed, the card is of no use.
_LEAST_GAIN = 2.0


@dataclass(frozen=True)
class PlacedUse:
    """One row of the report: an operator, its use in a step, and where it is computed."""

    name: str
    use: OperatorUse
    placement: Placement


@dataclass(frozen=True)
class StepEstimate:
    """Where a step is computed, and what that costs by the estimate.

    Attributes:
        rows: Operators, those on the CPU first, then by FLOPs and bytes.
        flops: Floating-point operations of all products of the step.
        cpu_flops: The part of them on the CPU.
        cpu_calls: Calls of operators on the CPU.
        host_bytes: Bytes of the tensors that travel to the CPU and back.
        slowdown: Estimated time of the step, as a multiple of its time on the card only.
        gain: Estimated time of the step on the CPU only, as a multiple of its time.
    """

    rows: List[PlacedUse]
    flops: int
    cpu_flops: int
    cpu_calls: int
    host_bytes: int
    slowdown: float
    gain: float

    @property
    def cpu_share(self) -> float:
        """Share of the FLOPs on the CPU, 0 to 1."""
        return self.cpu_flops / max(self.flops, 1)

    @property
    def is_useful(self) -> bool:
        """Whether the card computes the step at a useful speed."""
        return self.slowdown <= _USEFUL_SLOWDOWN and self.cpu_share <= _USEFUL_SHARE

    @property
    def answer(self) -> str:
        """The answer to "at a useful speed?", with the estimate behind it."""
        word = 'yes' if self.is_useful else 'in part' if self.gain >= _LEAST_GAIN else 'no'
        return (
            f'{word}: {self.cpu_share:.1%} of the FLOPs are on the CPU; by estimate a step '
            f'takes {self.slowdown:.1f} times as long as on the card only, and is '
            f'{self.gain:.1f} times as fast as on the CPU only'
        )


def estimate_step(recording: Recording, locations: OperatorLocations) -> StepEstimate:
    """Place the operators of a step, and estimate what those on the CPU cost."""
    rows = [PlacedUse(name, use, locations.locate(name)) for name, use in recording.uses.items()]
    rows.sort(
        key=lambda row: (
            row.placement.place is not OperatorPlace.CPU,
            row.placement.place.value,
            -row.use.flops,
            -row.use.moved_bytes,
            row.name,
        )
    )
    on_cpu = [row.use for row in rows if row.placement.place is OperatorPlace.CPU]
    on_card = [row.use for row in rows if row.placement.place is not OperatorPlace.CPU]
    seconds = sum(map(_card_seconds, on_card)) + sum(
        _cpu_seconds(use) + _link_seconds(use) for use in on_cpu
    )
    card_only = sum(_card_seconds(row.use) for row in rows)
    cpu_only = sum(_cpu_seconds(row.use) for row in rows)
    return StepEstimate(
        rows,
        recording.flops,
        sum(use.flops for use in on_cpu),
        sum(use.calls for use in on_cpu),
        sum(use.moved_bytes for use in on_cpu),
        seconds / max(card_only, 1e-12),
        cpu_only / max(seconds, 1e-12),
    )


def format_rows(estimate: StepEstimate) -> List[str]:
    """Return the lines of the table of operators. Views and other bookkeeping share one line."""
    lines = [f'  {"operator":<44} {"calls":>6} {"FLOPs":>7} {"MB":>9}  computed on']
    counts: Dict[str, int] = {}
    for row in estimate.rows:
        use, place = row.use, row.placement.place
        if place is OperatorPlace.COMPOSED or not use.computes:
            counts[row.name] = use.calls
            continue
        reason = f' ({row.placement.reason})' if row.placement.reason else ''
        lines.append(
            f'  {row.name:<44} {use.calls:>6} {use.flops / max(estimate.flops, 1):>7.1%} '
            f'{use.moved_bytes / 1e6:>9.2f}  {place.value}{reason}'
        )
    if counts:
        lines.append(f'  {"views, and what is composed of others":<44} {sum(counts.values()):>6}')
    return lines


def _card_seconds(use: OperatorUse) -> float:
    if not use.computes:
        return 0.0
    return _roofline(use, _CARD_FLOPS, _CARD_BANDWIDTH) + use.calls * _CARD_CALL


def _cpu_seconds(use: OperatorUse) -> float:
    if not use.computes:
        return 0.0
    return _roofline(use, _CPU_FLOPS, _CPU_BANDWIDTH) + use.calls * _CPU_CALL


def _link_seconds(use: OperatorUse) -> float:
    return use.moved_bytes / _LINK_BANDWIDTH + use.calls * _LINK_CALL


def _roofline(use: OperatorUse, flops: float, bandwidth: float) -> float:
    return max(use.flops / flops, use.moved_bytes / bandwidth)
