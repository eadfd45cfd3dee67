"""An exported file in 8-bit integers, calibrated on tiles."""
from __future__ import annotations

import os
import tempfile
from typing import Dict, Iterator, Optional, Sequence

import numpy as np
import onnx

from mapsage.inference.description import Bands
from mapsage.inference.exported import to_input

from .errors import ExportError
from .graph import INPUT
from .proof import Proof, Tile

MOST_LOSS = 1.0  # points of mIoU that a file in 8 bits may lose on the tiles


def quantize(model: onnx.ModelProto, tiles: Sequence[Tile], bands: Bands,
             batch: Optional[int]) -> onnx.ModelProto:
    """Return a file whose convolutions and products are in 8 bits.

    Activations are unsigned, with one scale each, which the tiles give; weights are signed, with a
    scale for each output channel. Scales stand in the graph (QuantizeLinear, DequantizeLinear), so
    that any runtime may compute with them.

    Args:
        model: File in float32.
        tiles: Tiles to calibrate on, others than those of the proof.
        bands: Bands of the model.
        batch: Number of images in a batch, None for any.

    Raises:
        ExportError: If ONNX Runtime cannot quantize it.
    """
    from onnxruntime import quantization
    if len(tiles) < (batch or 1):
        raise ExportError(f'--int8 with --batch {batch}: {len(tiles)} tile(s) calibrate, fewer '
                          f'than a batch. Take more with --tiles {batch}.')

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self._batches = _batches(tiles, bands, batch or 1)

        def get_next(self) -> Optional[Dict[str, np.ndarray]]:
            return next(self._batches, None)

    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, f'{name}.onnx') for name in ('float32', 'ready', 'int8')]
        onnx.save(model, paths[0])
        try:
            quantization.quant_pre_process(paths[0], paths[1], skip_symbolic_shape=True)
            quantization.quantize_static(
                paths[1], paths[2], Reader(), per_channel=True,
                quant_format=quantization.QuantFormat.QDQ,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8)
        except Exception as error:  # the runtime's own kinds
            raise ExportError(f'--int8: ONNX Runtime cannot quantize this model: '
                              f'{str(error)[:400]}') from error
        small = onnx.load(paths[2])
    for number in reversed(range(len(small.opset_import))):
        if small.opset_import[number].domain:
            del small.opset_import[number]
    small.ir_version = model.ir_version
    small.producer_name = model.producer_name
    return small


def describe(proof: Proof, calibrated: int) -> str:
    """Return a line on a file in 8 bits."""
    return (f'int8, calibrated on {calibrated} other tiles; {proof.tiles} tiles of the val set: '
            f'equal pixels {100 * proof.equal:.2f} %, mIoU {proof.before:.2f} (float32) and '
            f'{proof.after:.2f} (int8)')


def is_close(proof: Proof) -> bool:
    """Return whether a file in 8 bits may be written; without labels it may not."""
    return proof.before - proof.after <= MOST_LOSS


def _batches(tiles: Sequence[Tile], bands: Bands, batch: int) -> Iterator[Dict[str, np.ndarray]]:
    for first in range(0, len(tiles) - batch + 1, batch):
        images = np.stack([tile.image for tile in tiles[first:first + batch]])
        yield {INPUT: to_input(images, bands)}
