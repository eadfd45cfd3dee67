"""Quantization of an exported file to 8-bit integers, calibrated on tiles.

The quantized file is compared on tiles that did not calibrate it, and may lose at most one point
of mIoU there.
"""

from __future__ import annotations

import os
import tempfile
from typing import Dict, Iterator, Optional, Sequence

import numpy as np
import onnx

from mapsage.maps.file_inputs import FileInputs

from .errors import ExportError
from .proof import Proof, Tile

# Points of mIoU that the quantized file may lose on the tiles.
MOST_LOSS = 1.0


def quantize(
    model: onnx.ModelProto, tiles: Sequence[Tile], inputs: FileInputs, batch: Optional[int]
) -> onnx.ModelProto:
    """Return a model with convolutions and matrix products in 8 bits.

    Activations are unsigned, with one scale per tensor, calibrated on the tiles. Weights are
    signed, with one scale per output channel. The scales are part of the graph (QuantizeLinear,
    DequantizeLinear), so that any runtime can use them.

    Args:
        model: Model in float32.
        tiles: Tiles to calibrate on; the proof must use other tiles.
        inputs: Inputs of the model.
        batch: Number of images in a batch; None for any number.

    Raises:
        ExportError: If there are fewer tiles than a batch needs, or ONNX Runtime cannot quantize
            the model.
    """
    from onnxruntime import quantization

    if len(tiles) < (batch or 1):
        raise ExportError(
            f'--int8 with --batch {batch}: {len(tiles)} tile(s) for the calibration, '
            f'fewer than a batch. Take more with --tiles {batch}.'
        )

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self._batches = _batches(tiles, inputs, batch or 1)

        def get_next(self) -> Optional[Dict[str, np.ndarray]]:
            return next(self._batches, None)

    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, f'{name}.onnx') for name in ('float32', 'ready', 'int8')]
        onnx.save(model, paths[0])
        try:
            quantization.quant_pre_process(paths[0], paths[1], skip_symbolic_shape=True)
            quantization.quantize_static(
                paths[1],
                paths[2],
                Reader(),
                per_channel=True,
                quant_format=quantization.QuantFormat.QDQ,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
            )
        except Exception as error:
            # ONNX Runtime raises classes that share no base class with each other.
            raise ExportError(
                f'--int8: ONNX Runtime cannot quantize this model: {str(error)[:400]}'
            ) from error
        quantized = onnx.load(paths[2])
    # ONNX Runtime adds imports of the domains it defines, although no node uses them.
    for number in reversed(range(len(quantized.opset_import))):
        if quantized.opset_import[number].domain:
            del quantized.opset_import[number]
    quantized.ir_version = model.ir_version
    quantized.producer_name = model.producer_name
    return quantized


def describe(proof: Proof, calibrated: int) -> str:
    """Return a line about the proof of a quantized file."""
    return (
        f'int8, calibrated on {calibrated} other tiles; {proof.tiles} tiles of the val set: '
        f'equal pixels {100 * proof.equal:.2f} %, mIoU {proof.before:.2f} (float32) and '
        f'{proof.after:.2f} (int8)'
    )


def is_close(proof: Proof) -> bool:
    """Return whether a quantized file may be written: not without labels, whose mIoU is NaN."""
    return proof.before - proof.after <= MOST_LOSS


def _batches(
    tiles: Sequence[Tile], inputs: FileInputs, batch: int
) -> Iterator[Dict[str, np.ndarray]]:
    for first in range(0, len(tiles) - batch + 1, batch):
        images = np.stack([tile.image for tile in tiles[first : first + batch]])
        yield inputs.of_windows(images)
