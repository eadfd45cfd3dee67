"""Files that were compared with their model: in float32, and in 8 bits.

`export_float32` and `export_int8` make a file, describe it, run it on tiles of the validation set
and refuse it if it differs too much. Import this module only where ONNX and ONNX Runtime are
installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Optional, Sequence

import numpy as np
import onnx
import torch
from torch import nn

from mapsage.maps.description import ExportedDescription
from mapsage.maps.file_inputs import inputs_of
from mapsage.maps.predictor import WindowPredictor

from . import graph, metadata, quantize
from .errors import ExportError
from .module import module_of
from .proof import LEAST_EQUAL, MOST_DIFFERENCE, Tile, differing_layer, prove
from .targets import Target


def export_float32(
    out: Path,
    model: nn.Module,
    description: ExportedDescription,
    reference: WindowPredictor,
    target: Target,
    opset: int,
    tiles: Sequence[Tile],
    gsd: Optional[float],
    say: Callable[[str], None],
) -> onnx.ModelProto:
    """Return the file of a model in float32, described and compared with the model.

    Args:
        out: Path of the file, for error messages.
        model: Segmentor of MMSegmentation on the CPU.
        description: Description of the file.
        reference: The model's scores of windows.
        target: Runtime that will read the file.
        opset: Opset of the file.
        tiles: Tiles to compare on.
        gsd: Side of a pixel in meters, or None.
        say: Function that prints a line.

    Raises:
        ExportError: If the file cannot be made, or differs from the model on the tiles.
    """
    # Encoders check the units of their first batch, which must not be the example of the trace.
    reference(torch.from_numpy(np.ascontiguousarray(tiles[0].image[None])))
    module = module_of(model, description, [tile.image for tile in tiles[:2]]).eval()
    file = graph.trace(module, target, opset, description.batch)
    say(
        f'opset {opset}, IR {file.ir_version}, {len(file.graph.node)} nodes, '
        f'{file.ByteSize() / 2**20:.1f} MiB, for {target.reader}'
    )
    proof = prove(file, description, reference, tiles)
    say(str(proof))
    if not proof.holds:
        layer = differing_layer(module, opset, tiles[0])
        raise ExportError(
            f'{out} is not written: the export differs from the model, by more than '
            f'{MOST_DIFFERENCE:g} or in more than {100 * (1 - LEAST_EQUAL):.1f} % of '
            f'the pixels. '
            + (
                f'The first layer that differs is {layer}.'
                if layer
                else 'Which layer differs first cannot be told.'
            )
            + ' A forward that decides by values, or keeps a state, cannot be traced.'
        )
    metadata.describe(file, description, gsd)
    return file


def export_int8(
    file: onnx.ModelProto,
    description: ExportedDescription,
    gsd: Optional[float],
    reference: WindowPredictor,
    calibration: Sequence[Tile],
    tiles: Sequence[Tile],
    say: Callable[[str], None],
) -> onnx.ModelProto:
    """Return a file in 8 bits for a file in float32, described and compared with the model.

    Args:
        file: The file in float32.
        description: Description of the file.
        gsd: Side of a pixel in meters, or None.
        reference: The model's scores of windows.
        calibration: Tiles that decide the ranges of the integers.
        tiles: Other tiles, to compare on.
        say: Function that prints a line.

    Raises:
        ExportError: If the file in 8 bits loses too much.
    """
    small = quantize.quantize(file, calibration, inputs_of(description), description.batch)
    # The quantization drops the metadata.
    metadata.describe(small, description, gsd)
    proof = prove(small, description, reference, tiles)
    say(quantize.describe(proof, len(calibration)) + f'; {small.ByteSize() / 2**20:.1f} MiB')
    if not quantize.is_close(proof):
        raise ExportError(
            f'the file in 8 bits is not written: it loses more than '
            f'{quantize.MOST_LOSS:g} point of mIoU, or the tiles have no labels. '
            f'Calibrate on more tiles (--tiles), or leave out --int8.'
        )
    return small
