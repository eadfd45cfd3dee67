"""Targets of an export: the programs that read the file, and the ONNX versions that they support.

Too new an opset fails only on the reader's machine, so it is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Optional, Tuple

from .errors import ExportError


@dataclass(frozen=True)
class Target:
    """Limits of the programs that read a file.

    Attributes:
        name: Name on the command line.
        reader: The oldest program that must be able to read the file.
        opset: Default opset.
        opsets: Lowest and highest opset that the readers support and the exporter can write.
        ir: Version of the file format.
        batch: Number of images in a batch; None for any number.
    """

    name: str
    reader: str
    opset: int
    opsets: Tuple[int, int]
    ir: int
    batch: Optional[int] = None


TARGETS: Dict[str, Target] = {
    target.name: target
    for target in (
        # ONNX Runtime 1.17.0 is what the plugin pins. 17 is the first opset with layer norms.
        Target('qgis', "ONNX Runtime 1.17.0, which QGIS' Deepness plugin pins", 17, (13, 20), 9),
        # Enflame compiles one program per input shape, and names its models "op13".
        Target(
            'gcu', "ONNX Runtime 1.9.0, which Enflame's builds are made from", 13, (13, 15), 7, 1
        ),
        Target('onnx', 'ONNX Runtime 1.18 and newer, OpenVINO, TensorRT', 20, (13, 20), 10),
    )
}


def choose_target(requested: Optional[str], is_stack: bool) -> Target:
    """Return the target of a file.

    Args:
        requested: Name that the user requests; None for the default, QGIS, or for models of
            several dates other runtimes.
        is_stack: Whether the model takes several dates or sensors.

    Raises:
        ExportError: If the model takes several dates or sensors, which QGIS' plugin does not read.
    """
    if requested == 'qgis' and is_stack:
        raise ExportError(
            "--target qgis: QGIS' Deepness plugin reads images of one date, and this "
            'model takes several dates or sensors. Leave --target out, which is '
            '--target onnx; tools/predict.py makes maps for QGIS.'
        )
    return TARGETS[requested or ('onnx' if is_stack else 'qgis')]


def choose_opset(target: Target, requested: Optional[int], most: int) -> int:
    """Return the opset to write.

    Args:
        target: Target of the file.
        requested: Opset that the user requests; None for the target's default.
        most: Highest opset that this version of PyTorch writes.

    Raises:
        ExportError: If the readers, or PyTorch, do not support the requested opset.
    """
    lowest, highest = target.opsets
    if requested is None:
        return min(target.opset, most)
    if not lowest <= requested <= highest:
        raise ExportError(
            f'--opset {requested} with --target {target.name}: expected {lowest} to '
            f'{highest}; more is not read by {target.reader}.'
        )
    if requested > most:
        raise ExportError(f'--opset {requested}: this version of PyTorch writes up to {most}.')
    return requested
