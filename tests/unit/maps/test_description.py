"""The metadata of an ONNX file that somebody else has made."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from fuzzing import documents
from hypothesis import example, given

from mapsage.maps.description import KEY, Bands, ExportedDescription
from mapsage.maps.errors import PredictError

VALID = ExportedDescription(
    ('a', 'b'),
    ((0, 0, 0), (255, 0, 0)),
    Bands(3, False, (1, 2, 3)),
    512,
    128,
    None,
    2,
    0.5,
    'c',
    'onnx',
    '1.0',
)
PLACES = dict(
    type='SceneStackDataset',
    training_days=dict(s2=[15, 202]),
    sensors=dict(s2=dict(scenes='{place}_{date}.tif', bands=[1, 2], max_dates=2)),
)
OF_STACKS = replace(VALID, bands=Bands(10, False), places=PLACES)


@pytest.mark.parametrize('description', [VALID, OF_STACKS])
def test_what_is_written_is_read(description: ExportedDescription) -> None:
    assert ExportedDescription.from_metadata({KEY: description.to_text()}, 'm.onnx') == description


def test_a_file_of_an_older_version_has_no_places() -> None:
    stored = json.loads(VALID.to_text())
    del stored['places']
    assert ExportedDescription.from_metadata({KEY: json.dumps(stored)}, 'm.onnx') == VALID


@pytest.mark.parametrize(
    'change',
    [
        3,
        [],
        dict(PLACES, sensors=3),
        dict(PLACES, sensors=dict(s2=3)),
        dict(PLACES, type=None),
        dict(PLACES, training_days=[]),
        dict(PLACES, training_days=dict(s2=['1'])),
    ],
)
def test_places_of_another_kind_are_an_error(change: object) -> None:
    stored = dict(json.loads(VALID.to_text()), places=change)
    with pytest.raises(PredictError, match='m.onnx: its description cannot be read'):
        ExportedDescription.from_metadata({KEY: json.dumps(stored)}, 'm.onnx')


@given(documents(json.loads(OF_STACKS.to_text())))
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
