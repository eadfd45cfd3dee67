"""The loss of a step, worked out by hand from the model's own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from support import TINY_CONFIG
from torch.nn import functional

from mapsage.extras.labels.fixmatch.cut_mix import draw_boxes, paste
from mapsage.extras.labels.fixmatch.feature_views import FeatureLevelsError, given_features
from mapsage.extras.labels.fixmatch.fixmatch import BatchError, FixMatchStep
from mapsage.extras.labels.fixmatch.strong_view import StrongView
from mapsage.extras.labels.fixmatch.teacher import Teacher
from mapsage.extras.labels.fixmatch.unlabeled_loss import UnlabeledLoss

STILL = dict(jitter=0.0, gray=0.0, blur=0.0)
THRESHOLD = 0.16


@pytest.fixture
def student(tmp_path: Path) -> Any:
    init_default_scope('mmseg')
    path = tmp_path / 'tiny.py'
    path.write_text(TINY_CONFIG.replace('{data_root!r}', "''"))
    torch.manual_seed(0)
    model = MODELS.build(Config.fromfile(str(path)).model)
    torch.nn.init.normal_(model.decode_head.conv_seg.weight, std=0.3)
    return model.train()


def samples(kinds: str, size: int = 32, below: int = 0) -> List[Any]:
    """Data samples, L labeled and U unlabeled; the last rows are no part of the latter."""
    found = []
    for number, kind in enumerate(kinds):
        sample = SegDataSample(metainfo=dict(img_shape=(size, size), unlabeled=kind == 'U'))
        labels = torch.full((1, size, size), number % 7)
        sample.gt_sem_seg = PixelData(data=labels if kind == 'L' else torch.full_like(labels, 255))
        if kind == 'U':
            hidden = torch.full((1, size - below, size), 254, dtype=torch.uint8)
            hidden[:, :5] = 3
            sample.hidden_sem_seg = PixelData(data=hidden)
        found.append(sample)
    return found


def step_of(
    student: Any,
    cut_mix: float = 0.0,
    views: str = 'images',
    dropout: bool = False,
) -> FixMatchStep:
    teacher = Teacher(student, 0.9)
    torch.nn.init.normal_(teacher.module.decode_head.conv_seg.weight, std=0.3)
    return FixMatchStep(
        student, teacher, UnlabeledLoss(THRESHOLD), views, dropout, cut_mix, StrongView(**STILL)
    )


def logits_of(model: Any, images: torch.Tensor) -> torch.Tensor:
    return model.encode_decode(images, [dict(img_shape=(32, 32), ori_shape=(32, 32))] * len(images))


@pytest.mark.parametrize('cut_mix', [0.0, 1.0])
def test_the_loss_by_hand(student: Any, cut_mix: float) -> None:
    step, images = step_of(student, cut_mix), torch.randn(5, 3, 32, 32)
    data = samples('LLUUU', below=8)
    with torch.no_grad():
        confidence, classes = logits_of(step.teacher.module, images[2:]).softmax(1).max(1)
    step.unlabeled_loss.threshold = threshold = float(confidence.median())
    torch.manual_seed(4)
    losses = step(images, data)
    torch.manual_seed(4)
    boxes = draw_boxes(3, cut_mix, (32, 32))
    valid = torch.arange(32)[None, :, None].expand(3, 32, 32) < 24
    sure = (confidence >= threshold) & valid
    assert 0 < int(sure.sum()) < int(valid.sum())
    # The classes, and which of them are sure, move with the pixels.
    entropy = functional.cross_entropy(
        logits_of(student, paste(images[2:], boxes)), paste(classes, boxes), reduction='none'
    )
    expected = (entropy * paste(sure, boxes)).sum() / valid.sum()  # not by the sure ones
    assert torch.allclose(losses['unlabeled.loss_ce'], expected / 2, rtol=1e-5)
    plain = student.loss(images[:2], data[:2])
    assert torch.allclose(losses['decode.loss_ce'], plain['decode.loss_ce'] / 2)
    assert torch.equal(losses['decode.acc_seg'], plain['decode.acc_seg'])
    assert float(losses['unlabeled.passed']) == pytest.approx(int(sure.sum()) / int(valid.sum()))
    given, passed, known, right = step.seen[0].sum(1).tolist()
    assert (given, passed) == (float(valid.sum()), float(sure.sum()))
    truth = sure & (torch.arange(32)[None, :, None] < 5)
    assert (known, right) == (float(truth.sum()), float((truth & (classes == 3)).sum()))


def test_counts_of_each_class_by_hand(student: Any) -> None:
    """Where a truth is known: right ones among the sure pixels of each of the teacher's classes."""
    step, images, data = step_of(student), torch.randn(4, 3, 32, 32), samples('LUUU')
    generator = torch.Generator().manual_seed(2)
    for sample in data[1:]:
        hidden = torch.randint(0, 7, (1, 32, 32), generator=generator, dtype=torch.uint8)
        hidden[:, :8], hidden[:, -4:] = 254, 255  # without a class, and no part of the image
        sample.hidden_sem_seg = PixelData(data=hidden)
    step(images, data)
    with torch.no_grad():
        found = logits_of(step.teacher.module, images[1:]).softmax(1)
    expected = [[0] * 7 for _ in range(4)]
    for chances, sample in zip(found, data[1:]):
        for chance, truth in zip(
            chances.flatten(1).T.tolist(), sample.hidden_sem_seg.data.flatten().tolist()
        ):
            given = chance.index(max(chance))
            sure = max(chance) >= THRESHOLD
            for row, counts in enumerate(
                (truth != 255, truth != 255 and sure, truth < 254 and sure, truth == given and sure)
            ):
                expected[row][given] += counts
    assert step.seen[0].tolist() == expected
    assert min(sum(row) for row in expected) > 50 and sum(map(bool, expected[3])) > 2


def test_the_teacher_gets_no_gradient_and_the_student_one(student: Any) -> None:
    step = step_of(student, dropout=True)
    losses = step(torch.randn(4, 3, 32, 32), samples('LLUU'))
    losses['unlabeled.loss_ce'].backward()
    assert all(each.grad is None for each in step.teacher.module.parameters())
    assert all(each.grad is not None for each in student.backbone.parameters())


def test_views_of_channels_are_joined_by_their_mean(student: Any, monkeypatch: Any) -> None:
    """Without anything dropped, two views have the loss of one."""
    from mapsage.extras.labels.fixmatch import fixmatch

    monkeypatch.setattr(fixmatch, 'drop_channels', lambda *views: views)
    images, data = torch.randn(4, 3, 32, 32), samples('LLUU')
    one, two = step_of(student), step_of(student, dropout=True)
    two.teacher = one.teacher
    assert torch.allclose(
        one(images, data)['unlabeled.loss_ce'], two(images, data)['unlabeled.loss_ce'], rtol=1e-5
    )


def test_features_are_computed_once(student: Any) -> None:
    step, calls = step_of(student, 0.5, 'features'), []
    student.backbone.register_forward_hook(lambda *each: calls.append(len(each[1][0])))
    forward = student.backbone.forward
    del calls[:]
    images = torch.randn(5, 3, 32, 32)
    step(images, samples('LLUUU'))
    # The backbone once with all images; what it is given in the place of others is no computation.
    assert calls[0] == 5 and student.backbone.forward == forward
    assert 'forward' not in vars(student.backbone)


def test_given_features_are_put_away_after_an_error(student: Any) -> None:
    with pytest.raises(RuntimeError), given_features(student.backbone, (torch.zeros(1),)):
        raise RuntimeError
    assert 'forward' not in vars(student.backbone)


def test_features_of_another_kind(student: Any) -> None:
    student.backbone.forward = lambda images: images
    with pytest.raises(FeatureLevelsError, match='UNet returns Tensor, expected a tuple'):
        step_of(student, views='features')(torch.randn(2, 3, 32, 32), samples('LU'))


@pytest.mark.parametrize('kinds', ['LL', 'UU', 'ULU'])
def test_a_batch_without_a_kind_or_in_another_order(student: Any, kinds: str) -> None:
    with pytest.raises(BatchError, match=f'the kinds {kinds} .*LabeledUnlabeledSampler'):
        step_of(student)(torch.randn(len(kinds), 3, 32, 32), samples(kinds))


@pytest.mark.parametrize('threshold', [-0.1, 1.0, 95, True, float('nan')])
def test_a_threshold_out_of_range(threshold: Any) -> None:
    with pytest.raises(ValueError, match='expected a number of 0 or more and below 1'):
        UnlabeledLoss(threshold)


def test_a_count_of_pixels_before_images_are_stacked() -> None:
    assert UnlabeledLoss().count_batch(samples('LUU', below=8)).tolist() == [2 * 24 * 32, 1]
