"""The merged prediction of test-time augmentation: the mean probability, in every field."""
from __future__ import annotations

import copy

import pytest
import torch
from mmengine.structures import PixelData
from mmseg.models import SegTTAModel
from mmseg.structures import SegDataSample
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
    sample.set_data(dict(seg_logits=PixelData(data=scores),
                         gt_sem_seg=PixelData(data=torch.full((1, 4, 5), len(name)))))
    return sample


@pytest.mark.parametrize('channels', [1, 2, 4])
def test_labels_and_scores_are_those_of_the_mean_probability(channels: int) -> None:
    random = torch.Generator().manual_seed(channels)
    logits = torch.randn(3, 2, channels, 4, 5, generator=random) * 4  # views of two images
    probabilities = logits.sigmoid() if channels == 1 else logits.softmax(2)
    mean = probabilities.mean(0)
    images = [[view(logits[number, image], f'image {image}'[:5 + image]) for number in range(3)]
              for image in range(2)]
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
    logits[0] = 500.
    merged = SegTTAModel(Segmentor(3)).merge_preds([[view(logits, 'a'), view(logits, 'a')]])
    assert torch.isfinite(merged[0].seg_logits.data).all()
