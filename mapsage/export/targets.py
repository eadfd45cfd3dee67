"""Who reads an exported file, and what of ONNX they know."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Optional, Tuple

from .errors import ExportError


@dataclass(frozen=True)
class Target:
    """Limits of the programs that read a file.

    Attributes:
        name: Name on the command line.
        reader: The oldest program that is meant to read it.
        opset: Opset that is written unless another is asked for.
        opsets: Lowest and highest opset that the readers know and the exporter can write.
        ir: Version of the file format.
        batch: Number of images in a batch, None for any.
    """

    name: str
    reader: str
    opset: int
    opsets: Tuple[int, int]
    ir: int
    batch: Optional[int] = None


TARGETS: Dict[str, Target] = {target.name: target for target in (
    # ONNX Runtime 1.17.0 is what the plugin pins. 17 is the first opset with layer norms.
    Target('qgis', "ONNX Runtime 1.17.0, which QGIS' Deepness plugin pins", 17, (13, 20), 9),
    # The vendor compiles a program for each shape, and names its models "op13".
    Target('gcu', "ONNX Runtime 1.9.0, which Enflame's builds are made from", 13, (13, 15), 7, 1),
    Target('onnx', 'ONNX Runtime 1.18 and newer, OpenVINO, TensorRT', 20, (13, 20), 10),
)}


def choose_opset(target: Target, asked: Optional[int], most: int) -> int:
    """Return the opset to write.

    Args:
        target: Target of the file.
        asked: Opset that the user asks for, or None.
        most: Highest opset that this version of PyTorch writes.

    Raises:
        ExportError: If the readers, or PyTorch, do not know it.
    """
    lowest, highest = target.opsets
    if asked is None:
        return min(target.opset, most)
    if not lowest <= asked <= highest:
        raise ExportError(f'--opset {asked} with --target {target.name}: expected {lowest} to '
                          f'{highest}; more is not read by {target.reader}.')
    if asked > most:
        raise ExportError(f'--opset {asked}: this version of PyTorch writes up to {most}.')
    return asked
