"""The merged prediction of test-time augmentation: the mean probability, in every field."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from mask_models import CLASSES, build, eomt_config, samples_of
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, DefaultScope
from mmengine.structures import PixelData
from mmseg.models import SegTTAModel
from mmseg.structures import SegDataSample
from small_segmentors import CLASSES as STOCK_CLASSES
from small_segmentors import SIDE, resnet_fcn
from torch import nn


class Segmentor(nn.Module):
    """A model as far as merging asks for it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.out_channels = channels
        self.decode_head = nn.Module()
        self.decode_head.threshold = 0.3

    def test_step(self, data: dict) -> None:
        raise NotImplementedError


def view(logits: torch.Tensor, name: str) -> SegDataSample:
    """What ``EncoderDecoder.postprocess_result`` leaves in a sample."""
    sample = SegDataSample(metainfo=dict(img_path=name))
    scores = logits.sigmoid() if len(logits) == 1 else logits
    sample.set_data(
        dict(
            seg_logits=PixelData(data=scores),
            gt_sem_seg=PixelData(data=torch.full((1, 4, 5), len(name))),
        )
    )
    return sample


@pytest.mark.parametrize('channels', [1, 2, 4])
def test_labels_and_scores_are_those_of_the_mean_probability(channels: int) -> None:
    random = torch.Generator().manual_seed(channels)
    logits = torch.randn(3, 2, channels, 4, 5, generator=random) * 4  # views of two images
    probabilities = logits.sigmoid() if channels == 1 else logits.softmax(2)
    mean = probabilities.mean(0)
    images = [
        [view(logits[number, image], f'image {image}'[: 5 + image]) for number in range(3)]
        for image in range(2)
    ]
    merged = SegTTAModel(Segmentor(channels)).merge_preds(copy.deepcopy(images))
    for image, sample in enumerate(merged):
        wanted = mean[image] > 0.3 if channels == 1 else mean[image].argmax(0, keepdim=True)
        assert torch.equal(sample.pred_sem_seg.data, wanted.to(sample.pred_sem_seg.data))
        assert wanted.float().std() > 0
        found = sample.seg_logits.data
        found = found if channels == 1 else found.softmax(0)
        assert torch.allclose(found, mean[image], atol=1e-6)
        assert sample.img_path == images[image][0].img_path
        assert torch.equal(sample.gt_sem_seg.data, images[image][0].gt_sem_seg.data)


def test_certain_predictions_have_finite_logits() -> None:
    logits = torch.zeros(3, 4, 5)
    logits[0] = 500.0
    merged = SegTTAModel(Segmentor(3)).merge_preds([[view(logits, 'a'), view(logits, 'a')]])
    assert torch.isfinite(merged[0].seg_logits.data).all()


def augmented(model: Any, image: torch.Tensor) -> Any:
    """The prediction over an image and its mirror image, and those of both on their own."""
    with DefaultScope.overwrite_default_scope('mmseg'):
        tta = MODELS.build(dict(type='SegTTAModel', module=model))
    views, alone = [], []
    for flip in (False, True):
        sample = samples_of(torch.zeros(1, *image.shape[1:], dtype=torch.long))[0]
        sample.set_metainfo(dict(flip=flip, flip_direction='horizontal' if flip else None))
        view = image.flip(2) if flip else image
        views.append(dict(inputs=[view], data_samples=[sample]))
        alone.append(
            model.test_step(dict(inputs=[view.clone()], data_samples=[sample.clone()]))[
                0
            ].seg_logits.data
        )
    data = dict(
        inputs=[each['inputs'] for each in views],
        data_samples=[each['data_samples'] for each in views],
    )
    return tta.test_step(data)[0], alone


def test_scores_are_averaged_as_they_are() -> None:
    model = build(eomt_config()).eval()
    result, alone = augmented(model, torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8))
    mean = (alone[0] + alone[1]) / 2
    assert mean.shape == (CLASSES, 64, 64)
    torch.testing.assert_allclose(result.seg_logits.data, mean)
    assert torch.equal(result.pred_sem_seg.data[0], mean.argmax(0))
    assert result.gt_sem_seg.data.shape == (1, 64, 64) and result.img_path == 'tile_0.png'


def test_logits_get_their_softmax() -> None:
    model = revert_sync_batchnorm(resnet_fcn()).eval()
    result, alone = augmented(model, torch.randint(0, 256, (3, SIDE, SIDE), dtype=torch.uint8))
    mean = (alone[0].softmax(0) + alone[1].softmax(0)) / 2
    assert len(mean) == STOCK_CLASSES
    assert torch.equal(result.pred_sem_seg.data[0], mean.argmax(0))
