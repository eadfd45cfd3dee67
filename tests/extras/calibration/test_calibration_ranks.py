"""The calibration error on real ranks whose images do not divide, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked import fork_scenarios
from mmengine.dataset import DefaultSampler
from sampling_ranks import Answers, answers_of
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed import init_process_group
from mapsage.extras.calibration.calibration_metric import CalibrationError

CLASSES = ('field', 'road', 'water')
WORLDS, SIZES = (2, 3, 5), (1, 4, 7)


class Logits(Dataset):
    """Predictions of which no two are alike, of unequal sizes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict:
        random = torch.Generator().manual_seed(index)
        shape = 24, 20 + index
        logits = torch.randn(3, *shape, generator=random) * 3
        truth = torch.randint(0, 3, shape, generator=random)
        truth[:, :5] = 255
        return dict(
            seg_logits=dict(data=logits),
            gt_sem_seg=dict(data=truth[None]),
            pred_sem_seg=dict(data=logits.argmax(0)[None]),
            img_path=f'{index}.tif',
        )


def evaluated(images: Logits, sampler: Any) -> Any:
    metric = CalibrationError()
    metric.dataset_meta = dict(classes=CLASSES)
    for batch in DataLoader(images, 2, sampler=sampler, collate_fn=list):
        metric.process(None, batch)
    return metric.evaluate(len(images)), metric.counts


def every_size() -> Any:
    init_process_group(set_current_accelerator(resolve_accelerator('cpu')), timeout=40)
    return {
        (size, round_up): evaluated(
            Logits(size), DefaultSampler(Logits(size), shuffle=False, round_up=round_up)
        )
        for size in SIZES
        for round_up in (True, False)
    }


def all_images_on_every_rank() -> str:
    init_process_group(set_current_accelerator(resolve_accelerator('cpu')), timeout=40)
    try:
        evaluated(Logits(5), SequentialSampler(Logits(5)))
    except ValueError as error:
        dist.barrier()  # all ranks come here
        return str(error)
    return 'no error'


def run_scenarios(folder: Path) -> Dict[str, Any]:
    told: Dict[str, Any] = {f'sizes {world}': (every_size, world) for world in WORLDS}
    return fork_scenarios(dict(told, everything=(all_images_on_every_rank, 2)), folder)


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers_of(run_scenarios, tmp_path_factory.mktemp('calibration'))


@pytest.mark.parametrize('world', WORLDS)
def test_ranks_count_what_one_process_counts(world: int, answers: Answers) -> None:
    for told in answers.of(f'sizes {world}'):
        for (size, _), (figures, counts) in told.items():
            alone, expected = evaluated(Logits(size), SequentialSampler(Logits(size)))
            assert figures == alone and figures['ECE'] > 0
            np.testing.assert_array_equal(counts, expected)


def test_a_sampler_that_repeats_more_is_an_error_on_every_rank(answers: Answers) -> None:
    assert all(
        '[5, 5] images of a dataset of 5: a rank repeats more than one' in text
        for text in answers.of('everything')
    )
