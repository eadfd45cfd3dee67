"""EoMT and its loss compute what transformers' do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mask_models import CLASSES, QUERIES, build, eomt_config, labels_of
from support import main_leg

from mapsage.extras.mask_transformers import published
from mapsage.extras.mask_transformers.loss import QueryPrediction

transformers = pytest.importorskip('transformers', reason='no transformers for this Python')
pytestmark = main_leg

SIDE = 64
ARCHS = dict(
    plain=dict(embed_dims=32, num_layers=4, num_heads=2, feedforward_channels=48),
    deep=dict(embed_dims=48, num_layers=6, num_heads=3, feedforward_channels=64, num_registers=2),
)


def pair(arch: Any, blocks: int = 2) -> Any:
    """Our model and theirs with the same weights."""
    model = build(
        eomt_config(
            arch,
            backbone=dict(normalization=None),
            num_blocks=blocks,
            num_prefix=1 + arch.get('num_registers', 4),
        )
    )
    config = published.huggingface_config(model.backbone.arch, model.decode_head, SIDE)
    theirs = transformers.EomtDinov3ForUniversalSegmentation(
        transformers.EomtDinov3Config(**config)
    )
    state = published.to_huggingface(model.state_dict())
    state['criterion.empty_weight'] = theirs.criterion.empty_weight.clone()
    theirs.load_state_dict(state)
    return model, theirs


@pytest.mark.parametrize('masked', [True, False])
@pytest.mark.parametrize('name', ARCHS)
def test_logits_equal_those_of_transformers(name: str, masked: bool) -> None:
    model, theirs = pair(ARCHS[name])
    for each in (model.decode_head, theirs):
        each.attn_mask_probs.fill_(float(masked))
    x = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        own = model.eval()(x, mode='tensor')
        expected = theirs.eval()(pixel_values=x)
    assert len(own) == (3 if masked else 1)
    assert float(expected.masks_queries_logits.std()) > 0.1
    assert float((own[-1].masks - expected.masks_queries_logits).abs().max()) < 1e-5
    assert float((own[-1].classes - expected.class_queries_logits).abs().max()) < 1e-5


def test_scores_equal_those_of_the_image_processor() -> None:
    model, _ = pair(ARCHS['plain'])
    x = torch.randn(1, 3, SIDE, SIDE)
    meta = dict(img_shape=(SIDE, SIDE), ori_shape=(SIDE, SIDE), pad_shape=(SIDE, SIDE))
    with torch.no_grad():
        output = model.eval()(x, mode='tensor')[-1]
        scores = model.encode_decode(x, [meta])
        masks = torch.nn.functional.interpolate(output.masks, (SIDE, SIDE), mode='bilinear')
        expected = torch.einsum(
            'bqc,bqhw->bchw', output.classes.softmax(-1)[..., :-1], masks.sigmoid()
        )
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=1e-5)


def test_each_term_equals_that_of_transformers() -> None:
    """Their points are the centers of all cells; classes that are not there are left out."""
    model, theirs = pair(ARCHS['plain'], blocks=4)
    side = SIDE // 4
    criterion = theirs.criterion
    grid = torch.stack(torch.meshgrid(*[(torch.arange(side) + 0.5) / side] * 2, indexing='ij'), -1)
    points = grid.flip(-1).view(1, -1, 2)
    criterion.matcher.num_points = points.shape[1]
    criterion.sample_points_using_uncertainty = lambda logits, *_: points.expand(
        len(logits), -1, -1
    )
    labels = labels_of(3, side, block=2, classes=4)  # at the size of the masks: points are exact
    generator = torch.Generator().manual_seed(2)
    masks = torch.randn(3, QUERIES, side, side, generator=generator) * 2
    classes = torch.randn(3, QUERIES, CLASSES + 1, generator=generator)
    held = [torch.unique(each) for each in labels]
    targets = [
        torch.stack([each == label for label in present]).float()
        for each, present in zip(labels, held)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'rand', lambda *_, **__: points)  # the matcher's points
        expected = criterion(masks, classes, targets, held)
    own = model.decode_head.loss_decode([QueryPrediction(masks, classes)], labels)
    for name, theirs_name, weight in (
        ('loss_mask', 'loss_mask', 5),
        ('loss_dice', 'loss_dice', 5),
        ('loss_cls', 'loss_cross_entropy', 2),
    ):
        assert float(own[name]) / weight == pytest.approx(float(expected[theirs_name]), abs=1e-4)


def test_an_export_is_read_by_transformers(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model, theirs = pair(ARCHS['deep'])
    state = published.to_huggingface(model.state_dict())
    save_file(
        {key: value.contiguous() for key, value in state.items()},
        str(tmp_path / 'model.safetensors'),
        metadata=dict(format='pt'),
    )
    theirs.config.save_pretrained(str(tmp_path))
    read = transformers.EomtDinov3ForUniversalSegmentation.from_pretrained(str(tmp_path))
    x = torch.randn(1, 3, SIDE, SIDE)
    with torch.no_grad():
        assert torch.equal(
            read.eval()(pixel_values=x).masks_queries_logits,
            theirs.eval()(pixel_values=x).masks_queries_logits,
        )


def test_gated_networks_are_not_exported() -> None:
    model = build(eomt_config(dict(ARCHS['plain'], gated_mlp=True)))
    with pytest.raises(published.WeightsError, match='one activation'):
        published.huggingface_config(model.backbone.arch, model.decode_head, SIDE)
