"""The files of a step show its images and masks, its numbers, and whether they are the run's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import pytest
import torch
from mmengine.structures import BaseDataElement, PixelData

from mapsage.extras.forensics.replay_files import StepFacts, write_step
from mapsage.extras.forensics.step_recorder import RankStep, plain

NAN = float('nan')
FACTS: Any = dict(
    iteration=7,
    checkpoint='run/iter_5.pth',
    learning_rate=dict(lr=[0.25]),
    metainfo=dict(classes=('land', 'sea'), palette=[[0, 200, 0], [0, 0, 200]]),
)


def image_batch() -> Any:
    """Two samples: a blue image (BGR) all sea, and one whose mask has a label of no class."""
    samples = []
    for label in (1, 255):
        sample = BaseDataElement(
            metainfo=dict(img_path=f'tiles/{label}.png', sample_key=(3, (7, 0, 24)))
        )
        sample.gt_sem_seg = PixelData(data=torch.full((1, 32, 32), label))
        samples.append(sample)
    blue = torch.zeros(3, 32, 32, dtype=torch.uint8)
    blue[0] = 250
    return dict(inputs=[blue, blue], data_samples=samples)


def write(folder: Path, batch: Any, norms: Any = (('a', 3.0), ('b', 4.0)), **facts: Any) -> str:
    step = RankStep(2, plain(batch), dict(loss=0.1, other=2.0), dict(norms))
    write_step(folder, [step], StepFacts(**{**FACTS, **facts}))
    return (folder / 'step.txt').read_text()


def test_images_are_drawn_beside_their_masks(tmp_path: Path) -> None:
    text = write(tmp_path, image_batch(), differences=[])
    assert 'index 3, drawn with (7, 0, 24) tiles/255.png' in text and 'bit for bit' in text
    assert 'lr 0.25, from run/iter_5.pth' in text
    picture = cv2.imread(str(tmp_path / 'rank_2.png'))
    image, mask = picture[200, 200], picture[200, 700]  # the first row, in BGR
    assert image.tolist() == [250, 0, 0] and mask.tolist() == [200, 0, 0]


@pytest.mark.parametrize(
    'batch',
    [
        dict(inputs=[torch.ones(8)], data_samples=[BaseDataElement()]),
        [torch.ones(2, 8)],
        dict(inputs=torch.ones(1, 3, 4, 4), data_samples=[BaseDataElement()]),
    ],
    ids=['numbers', 'list', 'no mask'],
)
def test_other_batches_have_no_picture(batch: Any, tmp_path: Path) -> None:
    text = write(tmp_path, batch)
    assert 'does not say' in text and not (tmp_path / 'rank_2.png').exists()
    told = torch.load(str(tmp_path / 'rank_2.pth'))
    assert (told['virtual_rank'], told['iteration']) == (2, 7)


def test_the_first_bad_gradient_or_else_the_largest_is_named(tmp_path: Path) -> None:
    batch = image_batch()
    assert 'largest gradients: b 4, a 3' in write(tmp_path, batch)
    assert write(tmp_path, batch).splitlines()[4].split() == ['2', '0.1', '2', '5']
    text = write(
        tmp_path,
        batch,
        [('c', NAN), ('a', 3.0), ('b', float('inf'))],
        differences=['threads: 1, now 2'],
    )
    assert '2 of 3; in the order of the backward pass the first is c' in text
    assert 'not equal.\n  threads: 1, now 2' in text
