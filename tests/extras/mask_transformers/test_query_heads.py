"""EoMT and PMT as MMSegmentation's segmentors: losses, prediction, modes, bad input."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest
import torch
from mask_models import (
    ARCH,
    CLASSES,
    QUERIES,
    build,
    eomt_config,
    images_of,
    labels_of,
    losses_of,
    pmt_config,
    samples_of,
)
from mmengine.config import ConfigDict
from mmengine.optim import build_optim_wrapper

from mapsage.extras.mask_transformers.pmt import TokensError
from mapsage.extras.mask_transformers.query_head import class_scores

CONFIGS = dict(eomt=eomt_config, pmt=pmt_config)
META = dict(img_shape=(64, 64), ori_shape=(64, 64), pad_shape=(64, 64), padding_size=[0] * 4)


@pytest.fixture(params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> Any:
    return build(CONFIGS[request.param]())


def test_every_trained_parameter_gets_a_gradient(model: Any) -> None:
    losses = losses_of(model.train(), labels_of(2, void=0.2))
    assert set(losses) == {'decode.loss_mask', 'decode.loss_dice', 'decode.loss_cls'}
    sum(losses.values()).backward()  # type: ignore[union-attr]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained and all(each.grad is not None and each.grad.any() for each in trained)


def test_training_learns_a_batch(model: Any) -> None:
    """Some steps on one batch, after which most of its pixels are right."""
    model.train()
    labels = labels_of(2, block=32, seed=3)
    optimizer = build_optim_wrapper(
        model, dict(optimizer=dict(type='AdamW', lr=3e-3), clip_grad=dict(max_norm=1.0))
    )
    for _ in range(60):
        optimizer.update_params(sum(losses_of(model, labels).values()))
    data = dict(inputs=images_of(2), data_samples=samples_of(labels))
    found = torch.stack([each.pred_sem_seg.data[0] for each in model.eval().test_step(data)])
    assert float((found == labels).float().mean()) > 0.9


def test_frozen_parts_stay(model: Any) -> None:
    """``train()`` leaves a frozen encoder in evaluation, and positions know no mode."""
    model.train()
    frozen = not any(each.requires_grad for each in model.backbone.parameters())
    assert model.backbone.training != frozen and model.decode_head.training
    training = model.backbone.rope(4, 4)
    model.eval()
    assert all(torch.equal(*each) for each in zip(training, model.backbone.rope(4, 4)))


def test_one_pass_once_the_masks_are_gone(model: Any) -> None:
    """In evaluation blocks mask while their probability is above 0.5, in training all predict."""
    x = torch.rand(1, 3, 64, 64) * 255
    head = model.decode_head
    with torch.no_grad():
        masked = model.eval()(x, mode='tensor')
        assert len(masked) == 3
        head.attn_mask_probs.copy_(torch.tensor([0.3, 0.7]))
        assert len(model(x, mode='tensor')) == 3  # read at the last eval()
        assert len(model.eval()(x, mode='tensor')) == 2
        state = {key: value.clone() for key, value in model.state_dict().items()}
        state['decode_head.attn_mask_probs'].zero_()
        model.load_state_dict(state)
        plain = model(x, mode='tensor')
        assert len(plain) == 1 and not torch.equal(plain[-1].masks, masked[-1].masks)
        assert len(model.train()(x, mode='tensor')) == 3


def test_probabilities_mask_queries_at_random(model: Any) -> None:
    head = model.decode_head.train()
    masks = torch.full((40, QUERIES, 16, 16), -1.0)
    masks[..., :8] = 1.0
    head.attn_mask_probs[1] = 0.25
    torch.manual_seed(0)
    whole, some = (head._attention_mask(masks, (4, 4), index) for index in (0, 1))
    assert whole[..., : QUERIES + 5].all() and some[..., : QUERIES + 5].all()
    patches = whole[..., QUERIES + 5 :].reshape(40, QUERIES, 4, 4)
    assert patches[..., :2].all() and not patches[..., 2:].any()
    open_rows = some.all(2).float().mean()
    assert 0.7 < float(open_rows) < 0.8
    head.eval()
    assert not head._attention_mask(masks, (4, 4), 1).all(2).any()


def test_scores_are_sums_over_queries() -> None:
    masks, classes = torch.randn(2, 3, 4, 5), torch.randn(2, 3, CLASSES + 1)
    expected = torch.zeros(2, CLASSES, 4, 5)
    for query in range(3):
        share = classes[:, query].softmax(-1)[:, :-1, None, None]
        expected += share * masks[:, query, None].sigmoid()
    torch.testing.assert_allclose(class_scores(masks, classes), expected)


@pytest.mark.parametrize(
    'mode', [dict(mode='whole'), dict(mode='slide', crop_size=(64, 64), stride=(32, 32))]
)
def test_both_test_modes(model: Any, mode: Dict[str, Any]) -> None:
    """On an image that 16 does not divide, of 70 x 90 pixels."""
    model.test_cfg = ConfigDict(mode)
    image = torch.randint(0, 256, (3, 70, 90), dtype=torch.uint8)
    samples = samples_of(torch.zeros(1, 70, 90, dtype=torch.long))
    result = model.eval().test_step(dict(inputs=[image], data_samples=samples))[0]
    scores = result.seg_logits.data
    assert scores.shape == (CLASSES, 70, 90) and float(scores.min()) >= 0
    assert torch.equal(scores.argmax(0), result.pred_sem_seg.data[0])


def test_windows_are_averaged_as_scores(model: Any) -> None:
    """Two windows that overlap: the mean of their scores."""
    model.test_cfg = ConfigDict(mode='slide', crop_size=(64, 64), stride=(64, 32))
    x = torch.rand(1, 3, 64, 96) * 255
    with torch.no_grad():
        both = model.eval().inference(x, [dict(META, ori_shape=(64, 96))])
        left, right = (model.encode_decode(x[..., at : at + 64], [dict(META)]) for at in (0, 32))
    torch.testing.assert_allclose(both[..., 32:64], (left[..., 32:] + right[..., :32]) / 2)


@pytest.mark.skipif(
    not hasattr(torch, 'get_autocast_dtype'),
    reason='the layer norm of torch 1.10 takes no bfloat16 on the CPU',
)
def test_mixed_precision(model: Any) -> None:
    labels = labels_of(2)
    exact = losses_of(model.train(), labels)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        losses = losses_of(model, labels)
    for name, value in losses.items():
        assert value.dtype == torch.float32
        assert float(value) == pytest.approx(float(exact[name]), rel=0.1)


def test_recomputed_blocks_give_the_same_gradients() -> None:
    grads: List[Any] = []
    for with_cp in (False, True):
        model = build(eomt_config(backbone=dict(with_cp=with_cp))).train()
        torch.manual_seed(1)
        sum(losses_of(model, labels_of(2)).values()).backward()  # type: ignore[union-attr]
        grads.append(model.backbone.blocks[-1].attn.qkv.weight.grad)
    torch.testing.assert_allclose(grads[0], grads[1])


def test_pmt_sums_the_levels() -> None:
    """With identity norms and no blocks' effect, the tokens are the sum of f + MLP(f)."""
    model = build(pmt_config(norm_cfg=dict(type='GN', num_groups=1)))
    head = model.decode_head
    features = model.backbone(torch.rand(1, 3, 64, 64) * 255)
    captured: List[torch.Tensor] = []
    head.decode = lambda tokens, *_: captured.append(tokens)  # type: ignore[assignment]
    head(features)
    expected: Any = 0
    for level, lateral in enumerate(head.laterals):
        tokens = torch.cat((features[4 + level].flatten(2), features[level].flatten(2)), 2)
        normed = torch.nn.functional.group_norm(tokens, 1).transpose(1, 2)
        expected = expected + normed + lateral.mlp(normed)
    assert captured[0].shape == (1, 5 + 16, 32)
    torch.testing.assert_allclose(captured[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(backbone=dict(frozen=True)), 'use PMTHead'),
        (dict(backbone=dict(frozen_stages=3)), 'last 2 blocks, but 3 of 4 are frozen'),
        (dict(backbone=dict(final_norm=False)), 'final_norm=True'),
        (dict(num_blocks=5), 'the backbone has 4 blocks'),
        (dict(num_prefix=1), r'num_prefix=\(32, 1\), expected .*\(32, 5\)'),
        (dict(num_queries=4), 'num_queries=4 for num_classes=5'),
    ],
)
def test_settings_of_eomt_that_do_not_fit(change: Dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(eomt_config(**change))


def test_eomt_has_no_other_parts() -> None:
    config = eomt_config()
    for name in ('neck', 'auxiliary_head'):
        with pytest.raises(ValueError, match=f'EoMT with .*{name}'):
            build(dict(config, **{name: dict(type='Feature2Pyramid', embed_dim=32)}))
    other = dict(config, backbone=dict(type='EfficientNetLite'))
    with pytest.raises(ValueError, match='backbone EfficientNetLite .* expected DINOv3ViT'):
        build(other)
    wrong = dict(
        config, decode_head=dict(config['decode_head'], loss_decode=dict(type='CrossEntropyLoss'))
    )
    with pytest.raises(ValueError, match='expected a MaskClassLoss'):
        build(wrong)


def test_settings_of_pmt_that_do_not_fit() -> None:
    config = pmt_config()
    config['decode_head']['num_heads'] = 3
    with pytest.raises(ValueError, match='multiple of 4 x num_heads'):
        build(config)


@pytest.mark.parametrize(
    'change, found',
    [
        (dict(prefix_tokens=False), r'\[\(2, 32, 4, 4\), '),
        (dict(out_indices=(1, 3)), r'\(2, 32, 5, 1\)\]'),
        (dict(arch=dict(ARCH, num_registers=0)), r'\(2, 32, 1, 1\)'),
        (dict(arch=dict(ARCH, embed_dims=16)), r'\(2, 16, 4, 4\)'),
    ],
)
def test_features_that_pmt_cannot_read(change: Dict[str, Any], found: str) -> None:
    config = pmt_config()
    config['backbone'].update(change)
    with pytest.raises(TokensError, match=f'{found}.*prefix_tokens=True.*cache'):
        losses_of(build(config).train(), labels_of(2))


def test_a_crop_that_16_does_not_divide() -> None:
    model = build(eomt_config(size=56))
    with pytest.raises(ValueError, match='expected multiples of 16'):
        losses_of(model.train(), labels_of(1, 56))
