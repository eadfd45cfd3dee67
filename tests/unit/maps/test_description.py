"""The metadata of an ONNX file that somebody else has made."""
from __future__ import annotations

import json

import numpy as np
from fuzzing import documents
from hypothesis import example, given

from mapsage.maps.description import KEY, Bands, ExportedDescription
from mapsage.maps.errors import PredictError

VALID = ExportedDescription(
    ('a', 'b'), ((0, 0, 0), (255, 0, 0)), Bands(3, False, (1, 2, 3)), 512, 128, None, 2, 0.5, 'c',
    'onnx', '1.0')


def test_what_is_written_is_read() -> None:
    assert ExportedDescription.from_metadata({KEY: VALID.to_text()}, 'm.onnx') == VALID


@given(documents(json.loads(VALID.to_text())))
@example(VALID.to_text().replace('[255, 0, 0]', '[256, 0, 0]').encode())
@example(VALID.to_text().replace('[255, 0, 0]', '[0]').encode())
@example(VALID.to_text().replace('512', '0').encode())
@example(VALID.to_text().replace('512', '1e9').encode())
@example(VALID.to_text().replace('128', '512').encode())
@example(VALID.to_text().replace('"scores": 2', '"scores": -1').encode())
@example(VALID.to_text().replace('"count": 3', '"count": "3"').encode())
def test_any_metadata(content: bytes) -> None:
    try:
        description = ExportedDescription.from_metadata({KEY: content.decode('latin-1')}, 'm.onnx')
    except PredictError as error:
        assert 'm.onnx' in str(error)
        return
    classes = description.as_classes()
    assert classes.palette.shape == (len(classes.names), 3) and classes.palette.dtype == np.uint8
    assert all(type(side) is int for side in (description.window, description.overlap))
    assert 0 <= description.overlap < description.window <= 1 << 16
    assert 1 <= description.scores <= 1 << 16 and np.isfinite(description.threshold)
    assert type(description.bands.count) is int and description.bands.count >= 1
    assert description.batch is None or description.batch >= 1
