"""EoMT and PMT with batches, labels, classes and windows out of the ordinary."""

from __future__ import annotations

from typing import Any, Dict

import pytest
import torch
from mask_models import (
    build,
    eomt_config,
    images_of,
    labels_of,
    losses_of,
    pmt_config,
    samples_of,
)
from mmengine.config import ConfigDict

from mapsage.extras.mask_transformers.pmt import TokensError

CONFIGS = dict(eomt=eomt_config, pmt=pmt_config)
every_model = pytest.mark.parametrize('kind', list(CONFIGS))


def gradients_of(model: Any, labels: torch.Tensor) -> Dict[str, torch.Tensor]:
    """The gradients of a step; queries keep their masks, since chance would differ."""
    model.decode_head.attn_mask_probs.fill_(1.0)
    model.zero_grad()
    sum(losses_of(model, labels).values()).backward()  # type: ignore[union-attr]
    return {
        name: value.grad.clone() for name, value in model.named_parameters() if value.requires_grad
    }


@every_model
@pytest.mark.parametrize(
    'labels', [labels_of(1, void=0.3), torch.full((1, 64, 64), 3)], ids=['some', 'one class']
)
def test_a_batch_of_one_image(kind: str, labels: torch.Tensor) -> None:
    found = gradients_of(build(CONFIGS[kind]()).train(), labels)
    assert all(torch.isfinite(value).all() for value in found.values())
    assert all(value.any() for value in found.values())


@every_model
def test_a_batch_without_any_label(kind: str) -> None:
    """The step is one of zeros: nothing moves, and nothing breaks."""
    model = build(CONFIGS[kind]()).train()
    losses = losses_of(model, torch.full((2, 64, 64), 255))
    assert all(float(value) == 0 for value in losses.values())
    sum(losses.values()).backward()  # type: ignore[union-attr]
    for name, value in model.named_parameters():
        assert not value.requires_grad or value.grad is not None and not value.grad.any(), name


def test_an_image_without_labels_among_others() -> None:
    """Its gradients are zero, and the others are divided as without it."""
    model = build(eomt_config()).train()
    labels = labels_of(3)
    labels[2] = 255
    with_it, without = gradients_of(model, labels), gradients_of(model, labels[:2])
    for name, value in without.items():
        torch.testing.assert_allclose(
            with_it[name], value, rtol=1e-3, atol=1e-5 * float(value.abs().max())
        )


@every_model
def test_label_0_may_be_the_one_that_does_not_count(kind: str) -> None:
    """Of the loss, and of the counts that ranks exchange."""
    labels = labels_of(2, void=0.1)
    hidden = torch.where(labels == 0, torch.tensor(255), labels)
    plain, other = (build(CONFIGS[kind](ignore_index=index)).train() for index in (255, 0))
    also_void = torch.where(labels == 255, torch.tensor(0), labels)
    one, two = gradients_of(plain, hidden), gradients_of(other, also_void)
    assert all(torch.equal(one[name], two[name]) for name in one)
    counts = [
        model.decode_head.loss_decode.count_batch(samples_of(given)).tolist()
        for model, given in ((plain, hidden), (other, also_void))
    ]
    assert counts[0] == counts[1] == [8, 2, 1]


@every_model
@pytest.mark.parametrize('classes, queries', [(2, 2), (2, 9), (25, 25), (25, 40)])
def test_two_classes_and_many(kind: str, classes: int, queries: int) -> None:
    model = build(CONFIGS[kind](num_classes=classes, num_queries=queries)).train()
    losses = losses_of(model, labels_of(2, classes=classes))
    assert all(torch.isfinite(value) and value > 0 for value in losses.values())
    data = dict(inputs=images_of(1), data_samples=samples_of(labels_of(1)))
    result = model.eval().test_step(data)[0]
    assert result.seg_logits.data.shape == (classes, 64, 64)
    assert torch.equal(result.pred_sem_seg.data[0], result.seg_logits.data.argmax(0))


@every_model
def test_one_class_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match='num_classes=1: .*Set num_classes=2'):
        build(CONFIGS[kind](num_classes=1))


@every_model
def test_windows_smaller_than_the_crops_of_training(kind: str) -> None:
    """Of 32 pixels, from a model of 64; the scores of a window are those of it alone."""
    model = build(CONFIGS[kind]()).eval()
    model.test_cfg = ConfigDict(mode='slide', crop_size=(32, 32), stride=(32, 32))
    x = torch.rand(1, 3, 64, 32) * 255
    meta = dict(img_shape=(64, 32), ori_shape=(64, 32), pad_shape=(64, 32), padding_size=[0] * 4)
    with torch.no_grad():
        both = model.inference(x, [meta])
        lower = model.encode_decode(x[:, :, 32:], [dict(meta, img_shape=torch.Size((32, 32)))])
    torch.testing.assert_allclose(both[:, :, 32:], lower)


@pytest.mark.parametrize('stages', [0, 2])
def test_training_goes_on_after_an_evaluation(stages: int) -> None:
    """Frozen blocks stay in evaluation, positions stay, and the gradients are those of before."""
    model = build(eomt_config(backbone=dict(frozen_stages=stages, drop_path_rate=0.0))).train()
    before = gradients_of(model, labels_of(2))
    rope = model.backbone.rope(4, 4)
    model.eval().test_step(dict(inputs=images_of(1), data_samples=samples_of(labels_of(1))))
    model.train()
    assert [block.training for block in model.backbone.blocks] == [
        index >= stages for index in range(4)
    ]
    assert all(torch.equal(*each) for each in zip(rope, model.backbone.rope(4, 4)))
    after = gradients_of(model, labels_of(2))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_crops_that_16_does_not_divide() -> None:
    with pytest.raises(ValueError, match='expected multiples of 16'):
        losses_of(build(pmt_config(size=56)).train(), labels_of(1, 56))


def test_features_of_another_grid() -> None:
    """A cache whose levels have unequal sides, as of a pyramid."""
    head = build(pmt_config()).decode_head
    maps = [torch.zeros(1, 32, 4, 4)] * 3 + [torch.zeros(1, 32, 2, 2)]
    with pytest.raises(TokensError, match=r'\(1, 32, 2, 2\).*4 maps'):
        head([*maps, *[torch.zeros(1, 32, 5, 1)] * 4])


def test_adapters_in_the_blocks_that_the_queries_see() -> None:
    """EoMT with LoRA: all adapters and the new parts are trained, and nothing else."""
    model = build(
        eomt_config(backbone=dict(lora=dict(rank=4, targets=('q', 'v')), normalization='web'))
    ).train()
    found = gradients_of(model, labels_of(2))
    assert {name for name in found if name.startswith('backbone.')} == {
        f'backbone.blocks.{block}.attn.qkv.lora_{letter}.{part}'
        for block in range(4)
        for letter in 'AB'
        for part in 'qv'
    }
    assert all(value.any() for name, value in found.items() if '.lora_A.' not in name)
