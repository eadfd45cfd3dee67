"""Exchanged dates, other light and shifted dates."""

from __future__ import annotations

from typing import Any, Dict

import numpy as np
import pytest

from mapsage.extras.change import ExchangeDates, JitterDates, ShiftDate
from mapsage.geo.change_classes import ChangeClassError, from_to_classes
from mapsage.geo.stacks import StackLayout

LAYOUT = StackLayout.of_config(dict(image=dict(bands=[1, 2], max_dates=2)))
NAMES = from_to_classes(['field', 'house'])


@pytest.fixture
def sample() -> Dict[str, Any]:
    rng = np.random.default_rng(0)
    image = rng.integers(1, 255, (7, 9, 6), np.uint8)
    image[..., 4:] = 1
    image[0, 0, 2:4] = image[0, 0, 5] = 0
    labels = rng.integers(0, 3, (7, 9)).astype(np.uint8)
    labels[6] = 255
    return dict(
        img=image,
        gt_seg_map=labels,
        seg_fields=['gt_seg_map'],
        stack_layout=LAYOUT,
        days=(1, 2),
        img_path='a.png',
    )


def test_exchanged_dates_reverse_images_and_labels(sample: Dict[str, Any]) -> None:
    image, labels = sample['img'].copy(), sample['gt_seg_map'].copy()
    result = ExchangeDates(NAMES, prob=1.0)(sample)
    assert (result['img'] == image[..., [2, 3, 0, 1, 5, 4]]).all()
    assert (result['gt_seg_map'] == np.array([0, 2, 1] + [255] * 253)[labels]).all()
    assert result['days'] == (1, 2)
    again = ExchangeDates(NAMES, prob=1.0)(result)
    assert (again['img'] == image).all() and (again['gt_seg_map'] == labels).all()


def test_exchange_is_refused_where_labels_have_a_direction(sample: Dict[str, Any]) -> None:
    with pytest.raises(ChangeClassError, match="'felled' means another thing"):
        ExchangeDates(('unchanged', 'felled'))
    with pytest.raises(ChangeClassError, match='label 2 of a.png'):
        ExchangeDates(('unchanged', 'changed'), prob=1.0)(sample)


def test_exchange_has_its_probability(sample: Dict[str, Any]) -> None:
    np.random.seed(0)
    transform, count = ExchangeDates(NAMES, prob=0.25), 0
    for _ in range(200):
        first = sample['img'][0, 0, 0]
        count += int(transform(sample)['img'][0, 0, 0] != first)
    assert 30 < count < 70


def test_light_changes_independently_and_only_where_there_is_data(sample: Dict[str, Any]) -> None:
    np.random.seed(1)
    image = sample['img'].astype(np.float32)
    result = JitterDates(prob=1.0)(sample)['img']
    assert result.dtype == np.float32 and (result[0, 0, 2:4] == 0).all()
    assert (result[..., 4:] == image[..., 4:]).all()
    changes = [
        (result - image)[..., 2 * date : 2 * date + 2][image[..., 4 + date] > 0].mean()
        for date in (0, 1)
    ]
    assert abs(changes[0] - changes[1]) > 1
    # A line of gain and offset in each band.
    for band in (0, 1):
        fit = np.polyfit(image[..., band].ravel(), result[..., band].ravel(), 1)
        assert np.allclose(np.polyval(fit, image[..., band]), result[..., band], atol=0.05)
        assert 0.75 <= fit[0] <= 1.25


def test_color_changes_each_band_by_its_own_offset(sample: Dict[str, Any]) -> None:
    np.random.seed(1)
    image = sample['img'].astype(np.float32)
    changes = JitterDates(contrast=0, brightness=0, color=0.5, prob=1.0)(sample)['img'] - image
    offsets = [changes[1, 1, band] / image[..., band].std() for band in (0, 1)]
    assert all(abs(offset) <= 0.5 for offset in offsets) and abs(offsets[0] - offsets[1]) > 0.01


@pytest.mark.parametrize('shift', [(1, 0), (-2, 2), (0, -1), (9, 0)])
def test_the_second_date_is_shifted_and_its_edge_is_not_valid(
    sample: Dict[str, Any], shift: Any
) -> None:
    image, (columns, rows) = sample['img'].copy(), shift
    result = ShiftDate(fixed=shift)(sample)['img']
    assert (result[..., [0, 1, 4]] == image[..., [0, 1, 4]]).all()
    for row in range(7):
        for column in range(9):
            old = row - rows, column - columns
            inside = 0 <= old[0] < 7 and 0 <= old[1] < 9
            expected = image[old][[2, 3, 5]] if inside else 0
            assert (result[row, column, [2, 3, 5]] == expected).all()


def test_shifts_are_drawn_from_all_directions(sample: Dict[str, Any]) -> None:
    np.random.seed(0)
    original, drawn = sample['img'].copy(), set()
    for _ in range(300):
        result = ShiftDate(pixels=1)(dict(sample, img=original.copy()))['img']
        drawn.add(
            (
                int((result[..., 5].any(0) == 0).argmax()) if not result[3, :, 5].all() else -1,
                int((result[..., 5].any(1) == 0).argmax()) if not result[:, 4, 5].all() else -1,
            )
        )
    assert len(drawn) == 9


@pytest.mark.parametrize('options', [dict(pixels=1.5), dict(pixels=-1), dict(fixed=(1,))])
def test_a_shift_is_whole_pixels(options: Any) -> None:
    with pytest.raises(ChangeClassError, match='whole pixels'):
        ShiftDate(**options)


def test_stacks_of_more_dates_are_refused(sample: Dict[str, Any]) -> None:
    sample['stack_layout'] = StackLayout.of_config(dict(image=dict(bands=[1, 2], max_dates=3)))
    with pytest.raises(ChangeClassError, match='max_dates=2'):
        ShiftDate()(sample)
