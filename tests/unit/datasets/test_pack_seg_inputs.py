"""MapSage's PackSegInputs against MMSegmentation's: equal bits for every kind of image."""

import numpy as np
import pytest
import torch
from mmseg.datasets.transforms import PackSegInputs as StockPackSegInputs
from mmseg.registry import TRANSFORMS

from mapsage.datasets.band_layout import bands_first
from mapsage.datasets.packing import PackSegInputs
from mapsage.geo import GeoError


def test_configs_get_this_transform(mmseg_scope):
    transform = TRANSFORMS.build(dict(type='PackSegInputs'))
    assert type(transform) is PackSegInputs and isinstance(transform, StockPackSegInputs)


@pytest.mark.parametrize('dtype', ['uint8', 'uint16', 'float32', 'float64', 'int64', 'bool'])
@pytest.mark.parametrize('bands', [1, 3, 4, 130])
@pytest.mark.parametrize('view', ['whole', 'mirrored', 'upside down', 'turned', 'cut', 'gray'])
def test_a_packed_sample_has_the_bits_of_mmsegmentation(dtype, bands, view):
    if dtype == 'uint16' and not hasattr(torch, 'uint16'):
        pytest.skip('this torch has no uint16')
    image = np.random.RandomState(0).randint(0, 255, (10, 14, bands)).astype(dtype)
    image = {
        'whole': image,
        'mirrored': np.flip(image, 1),
        'upside down': np.flip(image, 0),
        'turned': np.rot90(np.flip(image, (0, 1))),
        'cut': image[2:7, 1:9:2],
        'gray': image[..., 0],
    }[view]
    labels = np.arange(image.shape[0] * image.shape[1], dtype=np.uint8).reshape(image.shape[:2])
    sample = dict(img=image, gt_seg_map=labels, img_path='a.png', img_shape=image.shape[:2])
    before = image.copy()
    ours, stock = PackSegInputs()(dict(sample)), StockPackSegInputs()(dict(sample))
    assert ours['inputs'].dtype == stock['inputs'].dtype
    assert ours['inputs'].is_contiguous() and torch.equal(ours['inputs'], stock['inputs'])
    assert torch.equal(ours['data_samples'].gt_sem_seg.data, stock['data_samples'].gt_sem_seg.data)
    assert ours['data_samples'].metainfo == stock['data_samples'].metainfo
    # The tensor shares no memory with the image, which a user's transform may keep.
    ours['inputs'].fill_(1)
    assert np.array_equal(image, before) or view == 'gray' or bands == 1


@pytest.mark.parametrize('value', [1.5, np.nan, np.inf, 256.0])
def test_labels_that_a_conversion_would_turn_into_a_class(value):
    labels = np.array([[0, 1], [value, 255]])
    sample = dict(img=np.zeros((2, 2, 3), np.uint8), gt_seg_map=labels, seg_map_path='a.npy')
    with pytest.raises(GeoError, match=f'mask a.npy holds the value {value}'):
        PackSegInputs()(sample)
    labels[1, 0] = 2
    packed = PackSegInputs()(sample)['data_samples'].gt_sem_seg.data
    assert packed.dtype == torch.int64 and packed.tolist() == [[[0, 1], [2, 255]]]


def test_bands_first_of_an_image_that_opencv_would_copy():
    image = np.random.RandomState(1).randint(0, 9, (6, 7, 3)).astype(np.float32)
    turned = image[::-1, ::-1]
    assert np.array_equal(bands_first(turned), turned.transpose(2, 0, 1))
