"""Rewards of hand-drawn label maps."""

from __future__ import annotations

from typing import Any, List

import numpy as np
import pytest
import torch
from label_pairs import data_sample
from mmengine.registry import METRICS, TASK_UTILS
from scipy import ndimage

from mapsage.extras.labels.rewards import ComponentsFound, PolygonCount, UnbrokenLength
from mapsage.extras.labels.rewards.reward_functions import Rewards


def drawn(*rows: str) -> np.ndarray:
    return np.array([[255 if cell == '.' else int(cell) for cell in row] for row in rows])


TRUTH = drawn('1100011', '1100011', '0000000', '1111111', '....000')


def test_components_found_counts_matches_misses_and_false_components() -> None:
    reward = TASK_UTILS.build(dict(type='ComponentsFound', classes=[1], min_pixels=2))
    assert reward(TRUTH, TRUTH) == 1
    lost = TRUTH.copy()
    lost[:2, 5:] = 0
    assert reward(lost, TRUTH) == pytest.approx(2 * 2 / (2 * 2 + 1))
    half = lost.copy()
    # 2 of 4 pixels: an IoU of 0.5 is no match, so the component is missed and a false one appears.
    half[0, 5:] = 1
    assert reward(half, TRUTH) == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    fragment = TRUTH.copy()
    # Below min_pixels.
    fragment[0, 3] = 1
    assert reward(fragment, TRUTH) == 1
    merged = np.where(TRUTH == 255, 255, 1)
    assert reward(merged, TRUTH) == 0


def test_the_mean_is_over_the_classes_of_the_truth() -> None:
    lost = np.where(TRUTH == 0, 1, TRUTH)
    assert ComponentsFound()(lost, TRUTH) == pytest.approx(
        (ComponentsFound(classes=[0])(lost, TRUTH) + ComponentsFound(classes=[1])(lost, TRUTH)) / 2
    )
    assert ComponentsFound(classes=[3])(lost, TRUTH) == 1
    assert PolygonCount()(TRUTH * 0 + 255, TRUTH * 0 + 255) == 1


def test_polygon_count_and_holes() -> None:
    more = TRUTH.copy()
    more[3, 3] = 0
    assert PolygonCount(classes=[1])(more, TRUTH) == pytest.approx(1 - 1 / 4)
    ring = drawn('11111', '10101', '11111')
    filled = drawn('11111', '11101', '11111')
    holes = PolygonCount(holes=True, classes=[1])
    assert holes(ring, ring) == 1 and holes(filled, ring) == pytest.approx(0.5)
    # One hole is connected to the outside by a corner.
    open_ring = drawn('11011', '10101', '11111')
    assert holes(open_ring, ring) == 0


def test_a_gap_breaks_a_road() -> None:
    reward = UnbrokenLength(classes=[1])
    road = drawn('0000000', '1111111', '0000000')
    gap = drawn('0000000', '1101111', '0000000')
    assert reward(road, road) == 1 and reward(gap, road) == pytest.approx(2 * 4 / (7 + 6))
    wide = drawn('1111111', '1111111', '0000000')
    assert reward(wide, road) == pytest.approx(2 * 7 / (7 + 14))
    assert reward(road * 0, road) == 0
    # Leaves the road and comes back.
    shifted = drawn('1110000', '0001111', '0000000')
    assert reward(shifted, road) == pytest.approx(2 * 4 / (7 + 7))
    assert UnbrokenLength(tolerance=1, classes=[1])(shifted, road) == 1
    two = drawn('1111000', '0000000', '0000011')
    one = drawn('1111000', '0000000', '0000000')
    assert reward(one, two) == pytest.approx(2 * 4 / (6 + 4))


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match='min_iou=0.3, expected 0.5 or more'):
        ComponentsFound(min_iou=0.3)


def test_the_metric_is_the_mean_over_images_of_the_predicted_maps() -> None:
    metric = METRICS.build(
        dict(
            type='MeanReward',
            rewards=[dict(type='UnbrokenLength', classes=[1]), dict(type='PolygonCount')],
        )
    )
    road = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 255, 0]])
    # The prediction has a class where the truth has no label.
    gap = road.clamp(max=1)
    gap[1, 1] = 0
    metric.process({}, [data_sample(labels, road).to_dict() for labels in (road, gap)])
    assert metric.evaluate(2) == {
        'UnbrokenLength': pytest.approx(50 * (1 + 2 * 2 / (4 + 3)), abs=0.01),
        'PolygonCount': pytest.approx(50 * (1 + (2 / 3 + 1 / 2) / 2), abs=0.01),
    }


ONE = data_sample(torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64))


def test_rewards_of_the_same_name_get_numbered_keys() -> None:
    metric = METRICS.build(
        dict(
            type='MeanReward',
            rewards=[
                dict(type='ComponentsFound', classes=[1]),
                dict(type='PolygonCount'),
                dict(type='ComponentsFound', classes=[0]),
            ],
        )
    )
    pieces = torch.tensor(TRUTH)
    metric.process({}, [data_sample(pieces.clamp(min=1), pieces).to_dict()])
    means = metric.evaluate(1)
    assert list(means) == ['ComponentsFound_1', 'PolygonCount', 'ComponentsFound_3']
    assert means['ComponentsFound_1'] == means['ComponentsFound_3'] == 0


def test_a_reward_that_is_not_finite_is_left_out_of_the_mean() -> None:
    values = iter([0.5, float('nan'), float('inf'), 0.7])
    metric = METRICS.build(dict(type='MeanReward', rewards=[lambda predicted, truth: next(values)]))
    metric.process({}, [ONE.to_dict()] * 4)
    assert metric.evaluate(4) == {'<lambda>': 60.0}


@pytest.mark.parametrize('value', [None, '0.5', [1.0, 2.0], np.ones(3), torch.ones(2), 1j])
def test_a_reward_that_is_no_number_is_an_error(value: Any) -> None:
    def road_length(predicted: np.ndarray, truth: np.ndarray) -> Any:
        return value

    metric = METRICS.build(dict(type='MeanReward', rewards=[road_length]))
    with pytest.raises(
        ValueError,
        match='the reward road_length returned .*, expected one number '
        r'for a label map of shape \(2, 2\)',
    ):
        metric.process({}, [ONE.to_dict()])


def test_a_reward_that_writes_into_its_maps_changes_no_other() -> None:
    def careless(predicted: np.ndarray, truth: np.ndarray) -> float:
        value = float((predicted == truth).mean())
        predicted[:], truth[:] = 0, 7
        return value

    metric = METRICS.build(dict(type='MeanReward', rewards=[careless, careless]))
    metric.process({}, [ONE.to_dict()])
    assert metric.evaluate(1) == {'careless_1': 100.0, 'careless_2': 100.0}
    both = Rewards([careless, careless])
    maps, truth = np.ones((1, 3, 4, 4), np.int64), np.ones((1, 4, 4), np.int64)
    assert (both.total(both(maps, truth, ['a tile'])) == 2).all()


def _components(mask: np.ndarray, with_corners: bool) -> List[np.ndarray]:
    """The connected components of a mask, by SciPy."""
    numbers, count = ndimage.label(mask, np.ones((3, 3)) if with_corners else None)
    return [numbers == number for number in range(1, count + 1)]


@pytest.mark.parametrize('seed', range(12))
def test_rewards_are_those_of_masks_compared_one_by_one(seed: int) -> None:
    random = np.random.RandomState(seed)
    truth = np.kron(random.randint(0, 2, (5, 6)), np.ones((5, 5), int))
    predicted = np.where(random.rand(*truth.shape) < 0.15, 1 - truth, truth)
    true, drawn_pieces = _components(truth == 1, False), _components(predicted == 1, False)
    matches = sum(
        (piece & other).sum() > 0.5 * (piece | other).sum()
        for piece in true
        for other in drawn_pieces
    )
    assert ComponentsFound(classes=[1], min_pixels=1)(predicted, truth) == pytest.approx(
        2 * matches / (len(true) + len(drawn_pieces))
    )
    covered = 0
    for road in _components(truth == 1, True):
        near = ndimage.binary_dilation(road, np.ones((3, 3)), 2)
        pieces = _components((predicted == 1) & near, True)
        covered += min(max([piece.sum() for piece in pieces], default=0), road.sum())
    assert UnbrokenLength(classes=[1], tolerance=2)(predicted, truth) == pytest.approx(
        min(1, 2 * covered / ((truth == 1).sum() + (predicted == 1).sum()))
    )


@pytest.mark.parametrize(
    'rewards, message',
    [
        ([], r'rewards=\[\], expected one or more'),
        (['PolygonCount'], "has 'PolygonCount', expected a config"),
    ],
)
def test_a_metric_without_a_function_is_refused(rewards: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        METRICS.build(dict(type='MeanReward', rewards=rewards))
