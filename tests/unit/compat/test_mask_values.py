"""Masks of more than 8 bits: their values become classes only if they are classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mmseg.registry import TRANSFORMS
from PIL import Image

import mapsage  # noqa: F401
from mapsage.geo import GeoError
from mapsage.geo.labels import byte_labels


def load(path: Path, mask: np.ndarray) -> np.ndarray:
    """Write a mask and read it as a training does."""
    Image.fromarray(mask).save(path)
    sample: Any = dict(seg_map_path=str(path), reduce_zero_label=False, seg_fields=[])
    return TRANSFORMS.get('mmseg.LoadAnnotations')().transform(sample)['gt_seg_map']


@pytest.mark.parametrize(
    'name, dtype',
    [
        ('a.png', 'uint8'),
        ('a.png', 'uint16'),
        ('a.tif', 'uint16'),
        ('a.tif', 'int32'),
        ('a.tif', 'float32'),
    ],
)
def test_classes_are_read_from_masks_of_any_type(tmp_path: Path, name: str, dtype: str) -> None:
    mask = np.array([[0, 1, 2], [17, 254, 255]])
    loaded = load(tmp_path / name, mask.astype(dtype))
    assert loaded.dtype == np.uint8
    np.testing.assert_array_equal(loaded, mask)


@pytest.mark.parametrize(
    'name, dtype, value',
    [
        ('a.png', 'uint16', 256),
        ('a.png', 'uint16', 257),
        ('a.tif', 'int32', 2**16 + 1),
        ('a.tif', 'int32', -2),
        ('a.tif', 'float32', 1.5),
        ('a.tif', 'float32', np.nan),
        ('a.tif', 'float32', np.inf),
    ],
)
def test_a_value_of_a_mask_that_is_no_class_is_named(
    tmp_path: Path, name: str, dtype: str, value: float
) -> None:
    mask = np.zeros((4, 5), dtype)
    mask[1] = value
    with pytest.raises(GeoError, match=rf'mask .*{name} holds the value {value}.* \(5 pixel\(s\)'):
        load(tmp_path / name, mask)


@pytest.mark.parametrize(
    'dtype', ['int8', 'uint16', 'int16', 'uint32', 'int32', 'int64', 'uint64', 'float16', 'float64']
)
def test_all_bits_of_a_label_mark_ignored_pixels(dtype: str) -> None:
    values = np.array([0, 1, 127], dtype)
    values[1] = np.iinfo(dtype).max if dtype[0] == 'u' else -1
    np.testing.assert_array_equal(byte_labels(values, 'a.png'), [0, 255, 127])
