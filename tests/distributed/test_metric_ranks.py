"""The metric on real ranks whose images do not divide, against one process and IoUMetric."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked import fork_scenarios
from mmengine.dataset import DefaultSampler
from mmseg.evaluation import IoUMetric
from sampling_ranks import Answers, answers_of
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed import init_process_group
from mapsage.evaluation import ConfusionMatrixMetric, boundary_counts, boundary_iou, scores

CLASSES = ('field', 'road', 'water', 'wood')
WORLDS, SIZES, BATCH = (1, 2, 3), (1, 2, 4, 7), 2
OPTIONS: Dict[str, Any] = dict(iou_metrics=['mIoU', 'mDice', 'mFscore'])


class Tiles(Dataset):
    """Tiles of which no two are alike; class 3 is in the first one only, tile 2 is all ignored."""

    def __init__(self, size: int, bad: Sequence[int] = ()) -> None:
        self.size, self.bad = size, bad

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict:
        rng = np.random.default_rng(index)
        truth = rng.integers(0, 4 if index == 0 else 3, (24, 20 + index))
        prediction = np.where(rng.random(truth.shape) < 0.7, truth, (truth + 1) % 4)
        truth[:, : 5 if index != 2 else None] = 255
        if index in self.bad:
            truth[0, 6] = 9
        pred, gt = (dict(data=torch.from_numpy(each)[None]) for each in (prediction, truth))
        return dict(pred_sem_seg=pred, gt_sem_seg=gt, img_path=f'tile_{index}.tif')


def evaluated(metric: Any, tiles: Tiles, sampler: Any) -> Any:
    metric.dataset_meta = dict(classes=CLASSES)
    for batch in DataLoader(tiles, BATCH, sampler=sampler, collate_fn=list):
        metric.process(None, batch)
    return metric.evaluate(len(tiles))


def start() -> int:
    init_process_group(set_current_accelerator(resolve_accelerator('cpu')), timeout=40)
    return dist.get_rank()


def recorded(function: Any) -> Tuple[Any, List[Tuple[str, str, int]]]:
    """Return what ``function`` returns, and name, dtype and numbers of each collective."""
    entered: List[Tuple[str, str, int]] = []
    originals = {
        name: getattr(dist, name)
        for name in (
            'all_reduce',
            'all_gather',
            'all_gather_object',
            'broadcast',
            'broadcast_object_list',
            'barrier',
            'gather',
            'gather_object',
            'reduce',
            'send',
            'recv',
        )
    }

    def recording(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[0] if args and isinstance(args[0], torch.Tensor) else torch.empty(0)
            entered.append((name, str(tensor.dtype), tensor.numel()))
            return originals[name](*args, **kwargs)

        return call

    try:
        for name in originals:
            setattr(dist, name, recording(name))
        return function(), entered
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def every_size() -> Any:
    """Return by size and sampler the figures, the matrix and the collectives of this rank."""
    start()
    told = {}
    for size in SIZES:
        for round_up in (True, False):
            tiles = Tiles(size)
            metric = ConfusionMatrixMetric(
                iou_metrics=[*OPTIONS['iou_metrics'], 'mBoundaryIoU', 'kappa']
            )
            # the sampler agrees on a seed, which is a collective of its own
            sampler = DefaultSampler(tiles, shuffle=False, round_up=round_up)
            figures, entered = recorded(lambda m=metric, t=tiles, s=sampler: evaluated(m, t, s))
            told[size, round_up] = figures, metric.matrix, entered
    return told


def shuffled() -> Any:
    start()
    tiles, metric = Tiles(5), ConfusionMatrixMetric(**OPTIONS)
    evaluated(metric, tiles, DefaultSampler(tiles, shuffle=True, seed=3))
    return metric.matrix


def failing(bad: Sequence[int]) -> str:
    start()
    tiles = Tiles(5, bad)
    try:
        evaluated(ConfusionMatrixMetric(), tiles, DefaultSampler(tiles, shuffle=False))
    except ValueError as error:
        dist.barrier()  # all ranks come here, none is left behind in a collective
        return str(error)
    return 'no error'


def all_images_on_every_rank() -> str:
    start()
    tiles = Tiles(5)
    try:
        evaluated(ConfusionMatrixMetric(), tiles, SequentialSampler(tiles))
    except ValueError as error:
        return str(error)
    return 'no error'


def scenarios() -> Dict[str, Any]:
    told: Dict[str, Any] = {
        f'{name} {world}': (function, world)
        for world in WORLDS
        for name, function in (('sizes', every_size), ('shuffled', shuffled))
    }
    told['bad'] = failing, 2, (3,)
    told['bad twice'] = failing, 3, (0, 4)
    told['everything'] = all_images_on_every_rank, 2
    return told


def run_scenarios(folder: Path) -> Dict[str, Any]:
    return fork_scenarios(scenarios(), folder)


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers_of(run_scenarios, tmp_path_factory.mktemp('metric'))


def by_hand(size: int) -> np.ndarray:
    matrix = np.zeros((4, 4), np.int64)
    for number in range(size):
        item = Tiles(size)[number]
        truth, predicted = (item[key]['data'].numpy() for key in ('gt_sem_seg', 'pred_sem_seg'))
        np.add.at(matrix, (truth[truth != 255], predicted[truth != 255]), 1)
    return matrix


@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('world', WORLDS)
def test_ranks_say_what_one_process_says(world: int, size: int, answers: Answers) -> None:
    tiles = Tiles(size)
    mmseg = evaluated(IoUMetric(**OPTIONS), tiles, SequentialSampler(tiles))
    edges = boundary_iou(
        sum(
            boundary_counts(item['pred_sem_seg']['data'][0], item['gt_sem_seg']['data'][0], 4)
            for item in (tiles[number] for number in range(size))
        )
    )
    matrix = by_hand(size)
    expected = {key: round(float(value), 2) for key, value in mmseg.items()}
    expected['mBoundaryIoU'] = round(100 * float(np.nanmean(edges)), 2)
    expected['kappa'] = round(100 * scores(matrix)['kappa'], 2)
    for told in answers.of(f'sizes {world}'):
        for round_up in (True, False):
            figures, found, _ = told[size, round_up]
            np.testing.assert_array_equal(found, matrix)
            assert figures == expected


@pytest.mark.parametrize('world', WORLDS)
def test_ranks_exchange_two_integer_tensors_and_no_pickle(world: int, answers: Answers) -> None:
    counts = 2 + 4 * 4 + 3 * 4
    expected = (
        []
        if world == 1
        else [('all_reduce', 'torch.int64', 3 * world), ('all_reduce', 'torch.int64', counts)]
    )
    for told in answers.of(f'sizes {world}'):
        assert all(entered == expected for _, _, entered in told.values())


@pytest.mark.parametrize('world', WORLDS)
def test_shuffled_images_count_once(world: int, answers: Answers) -> None:
    for matrix in answers.of(f'shuffled {world}'):
        np.testing.assert_array_equal(matrix, by_hand(5))


def test_labels_outside_the_classes_end_every_rank(answers: Answers) -> None:
    one, other = answers.of('bad')
    assert one.startswith('images of rank(s) 1, whose message names the first: 1 truth pixel(s)')
    assert other.startswith('tile_3.tif: 1 truth pixel(s) and 0 predicted')
    # The repeat of tile 0 on rank 2 is bad as well.
    assert [text.split(':')[0] for text in answers.of('bad twice')] == [
        'tile_0.tif',
        'tile_4.tif',
        'tile_0.tif',
    ]


def test_a_sampler_that_repeats_more_is_an_error_on_every_rank(answers: Answers) -> None:
    assert all(
        '[5, 5] images of a dataset of 5: a rank repeats more than one' in text
        for text in answers.of('everything')
    )
