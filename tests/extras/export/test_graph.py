"""Segmentors as ONNX files: ONNX Runtime computes the same as tools/predict.py."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Tuple

import numpy as np
import pytest
import torch
from mask_models import ARCH, build, eomt_config, pmt_config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import DefaultScope
from small_segmentors import resnet_fcn, vit_upernet

onnx = pytest.importorskip('onnx')
pytest.importorskip('onnxruntime')

from mapsage.accelerator import resolve_accelerator  # noqa: E402
from mapsage.extras.export.errors import ExportError  # noqa: E402
from mapsage.extras.export.graph import (  # noqa: E402
    check,
    fuse_padding,
    most_opset,
    trace,
)
from mapsage.extras.export.module import ImageToScores  # noqa: E402
from mapsage.extras.export.proof import Tile, differing_layer, prove  # noqa: E402
from mapsage.extras.export.targets import TARGETS, choose_opset  # noqa: E402
from mapsage.maps.description import Bands, ExportedDescription  # noqa: E402
from mapsage.maps.file_inputs import ImageInputs  # noqa: E402
from mapsage.maps.predictor import WindowPredictor  # noqa: E402

SIDE = 64
NORM = dict(type='BN')
PREPROCESSOR = dict(
    type='SegDataPreProcessor', mean=[120.0, 110.0, 100.0], std=[60.0, 61.0, 62.0], bgr_to_rgb=True
)


def efficientnet_fpn(channels: int = 3, rgb: bool = True, **head: Any) -> Any:
    means = dict(mean=[900.0] * channels, std=[400.0] * channels)
    return build(
        dict(
            type='EncoderDecoder',
            data_preprocessor=(
                dict(PREPROCESSOR, bgr_to_rgb=rgb)
                if channels == 3
                else dict(type='BandDataPreProcessor', test_cfg=dict(size_divisor=48), **means)
            ),
            backbone=dict(type='EfficientNetLite', in_channels=channels),
            neck=dict(type='FPN', in_channels=[24, 40, 112, 320], out_channels=8, num_outs=4),
            decode_head=dict(
                dict(
                    type='FPNHead',
                    in_channels=[8] * 4,
                    in_index=[0, 1, 2, 3],
                    channels=8,
                    feature_strides=[4, 8, 16, 32],
                    dropout_ratio=0.1,
                    num_classes=5,
                    norm_cfg=NORM,
                    align_corners=False,
                ),
                **head,
            ),
            test_cfg=dict(mode='whole'),
        )
    )


def one_output() -> Any:
    return efficientnet_fpn(
        rgb=False,
        num_classes=2,
        out_channels=1,
        threshold=0.4,
        align_corners=True,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=True),
    )


def vit_with(head: Dict[str, Any]) -> Any:
    dims = ARCH['embed_dims']
    return build(
        dict(
            eomt_config(),
            type='EncoderDecoder',
            backbone=dict(type='DINOv3ViT', arch=ARCH, out_indices=(0, 1, 2, 3)),
            decode_head=dict(
                head,
                in_channels=[dims] * 4,
                in_index=[0, 1, 2, 3],
                num_classes=5,
                norm_cfg=NORM,
                align_corners=False,
            ),
        )
    )


def upernet() -> Any:
    return vit_with(dict(type='UPerHead', channels=8, pool_scales=(1, 2, 3, 6)))


def linear() -> Any:
    return vit_with(
        dict(type='LinearHead', channels=4 * ARCH['embed_dims'], input_transform='resize_concat')
    )


def random_tiles(bands: Bands, side: int = SIDE, count: int = 4) -> Any:
    rng = np.random.default_rng(5)
    shape = bands.count, side, side
    return [
        Tile(
            rng.integers(0, 256, shape, np.uint8)
            if bands.like_opencv
            else rng.integers(0, 4000, shape).astype(np.float32),
            rng.integers(0, 2, shape[1:]),
        )
        for _ in range(count)
    ]


def settle(model: Any) -> Any:
    """Set the statistics of norms to values other than their initial ones."""
    model = revert_sync_batchnorm(model).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            torch.nn.init.normal_(module.running_mean, std=0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


def export(model: Any, bands: Bands, target: str, side: int = SIDE) -> Any:
    """Return the file of a model, its description and the reference."""
    resolve_accelerator('cpu')
    reference = WindowPredictor(model, torch.device('cpu'), (side, side), 0, 1)
    limits = TARGETS[target]
    description = ExportedDescription(
        tuple(map(str, range(max(2, reference.scores)))),
        ((0, 0, 0),) * max(2, reference.scores),
        bands,
        side,
        side // 4,
        limits.batch,
        reference.scores,
        reference.threshold,
        '',
        target,
        '',
    )
    module = ImageToScores(model, bands, side).eval()
    file = trace(module, limits, choose_opset(limits, None, most_opset()), limits.batch)
    return file, description, reference


def dims(value: Any) -> list:
    return [side.dim_param or side.dim_value for side in value.type.tensor_type.shape.dim]


# All shipped segmentors, and variants of head, bands and batch.
SEGMENTORS: Dict[str, Tuple[Callable[[], Any], Bands, str]] = {
    'fpn': (efficientnet_fpn, Bands(3, True), 'qgis'),
    'one output, corners aligned, blue first': (one_output, Bands(3, True), 'gcu'),
    'four bands of 16 bits, padded': (lambda: efficientnet_fpn(4), Bands(4, False), 'qgis'),
    'fcn with an auxiliary head': (resnet_fcn, Bands(3, True), 'gcu'),
    'dinov3 and upernet': (upernet, Bands(3, True), 'gcu'),
    'dinov3 and linear': (linear, Bands(3, True), 'onnx'),
    'eomt with masks': (lambda: build(eomt_config()), Bands(3, True), 'gcu'),
    'pmt with masks': (lambda: build(pmt_config()), Bands(3, True), 'qgis'),
    'batch in the second side': (vit_upernet, Bands(3, True), 'onnx'),
}
OPEN_BATCH_OF_TRANSFORMERS = ('dinov3 and linear', 'pmt with masks', 'batch in the second side')


@functools.lru_cache(None)
def exported(name: str) -> Any:
    """Return the file of a segmentor, its description and the reference."""
    make, bands, target = SEGMENTORS[name]
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmseg'):
        return export(settle(make()), bands, target)


@pytest.mark.parametrize('name', SEGMENTORS)
def test_a_file_computes_the_same_as_predict(name: str) -> None:
    if most_opset() < 17 and name in OPEN_BATCH_OF_TRANSFORMERS:
        pytest.skip('PyTorch before 1.13 writes transformers with a fixed batch only')
    file, description, reference = exported(name)
    bands, limits = description.bands, TARGETS[description.target]
    proof = prove(file, description, reference, random_tiles(bands))
    assert proof.largest < 1e-5 and proof.equal > 0.9999, proof
    assert file.ir_version == limits.ir and len(file.opset_import) == 1
    batch = limits.batch or 'batch'
    assert dims(file.graph.input[0]) == [batch, bands.count, SIDE, SIDE]
    assert dims(file.graph.output[0]) == [batch, description.scores, SIDE, SIDE]
    assert not any(tensor.external_data for tensor in file.graph.initializer)


def test_nan_scores_fail_the_proof() -> None:
    file, description, reference = exported('fpn')
    broken = onnx.ModelProto()
    broken.CopyFrom(file)
    weight = next(tensor for tensor in broken.graph.initializer if len(tensor.dims) == 4)
    weight.raw_data = np.full(list(weight.dims), np.nan, np.float32).tobytes()
    proof = prove(broken, description, reference, random_tiles(description.bands))
    assert proof.largest == float('inf') and not proof.holds
    unlabeled = [
        Tile(tile.image, np.full_like(tile.labels, 255))
        for tile in random_tiles(description.bands, count=1)
    ]
    assert '1 tile of the val set' in str(prove(file, description, reference, unlabeled))
    assert str(prove(file, description, reference, unlabeled)).endswith('%, without labels')


class Counting(torch.nn.Module):
    """Returns a different result at every call, which a trace cannot reproduce."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


def test_the_layer_that_differs_is_named() -> None:
    if most_opset() < 17:
        pytest.skip('PyTorch before 1.13 may not write all layers of this model')
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = settle(resnet_fcn())
    model.decode_head.dropout = Counting()
    bands = Bands(3, True)
    module = ImageToScores(model, bands, SIDE).eval()
    assert differing_layer(module, 17, random_tiles(bands)[0]) == ('decode_head.dropout (Counting)')
    model.decode_head.dropout = None
    assert differing_layer(module, 17, random_tiles(bands)[0]) is None


class Pairs(ImageToScores):
    """A module that takes exactly two images."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.inputs, self.window, self._bands = ImageInputs(Bands(3, True), SIDE), SIDE, 3

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return inputs[0].reshape(2, -1).reshape(2, 3, SIDE, SIDE).softmax(1)


def test_a_batch_that_stays_fixed_is_an_error() -> None:
    with pytest.raises(ExportError, match='--batch 1'):
        trace(
            Pairs().eval(), TARGETS['onnx'], choose_opset(TARGETS['onnx'], None, most_opset()), None
        )


def test_padding_goes_into_the_convolutions() -> None:
    kinds = [node.op_type for node in exported('fpn')[0].graph.node]
    assert 'Pad' not in kinds and kinds.count('Conv') > 50
    # It would be 1,319 nodes if every use of a shape were in the graph.
    assert len(kinds) < 200


def padded_convolution(mode: str, value: float, readers: int = 1) -> Any:
    make = onnx.helper
    nodes = [
        make.make_node('Pad', ['x', 'pads', 'value'], ['y'], mode=mode),
        make.make_node('Conv', ['y', 'w'], ['z'], pads=[1, 1, 1, 1]),
    ]
    nodes += [make.make_node('Relu', ['y'], ['r'])] * (readers - 1)
    return make.make_graph(
        nodes,
        'g',
        [make.make_tensor_value_info('x', 1, [1, 1, 5, 5])],
        [make.make_tensor_value_info('z', 1, None)],
        [
            onnx.numpy_helper.from_array(np.array([0, 0, 0, 1, 0, 0, 2, 3]), 'pads'),
            onnx.numpy_helper.from_array(np.float32(value), 'value'),
            onnx.numpy_helper.from_array(np.ones((1, 1, 3, 3), np.float32), 'w'),
        ],
    )


@pytest.mark.parametrize(
    'mode, value, readers, stays',
    [
        ('constant', 0, 1, False),
        ('constant', 1, 1, True),
        ('reflect', 0, 1, True),
        ('constant', 0, 2, True),
    ],
)
def test_only_zeros_with_one_convolution_as_reader_are_moved(
    mode: str, value: float, readers: int, stays: bool
) -> None:
    graph = padded_convolution(mode, value, readers)
    fuse_padding(graph)
    assert [node.op_type for node in graph.node][:1] == (['Pad'] if stays else ['Conv'])
    pads = next(node for node in graph.node if node.op_type == 'Conv').attribute[0].ints
    assert list(pads) == ([1, 1, 1, 1] if stays else [1, 2, 3, 4])


def test_branches_and_foreign_opsets_are_refused() -> None:
    graph = padded_convolution('constant', 0)
    file = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid('', 18)])
    with pytest.raises(ExportError, match=r"opsets \{'': 18\}, expected 13 .* 1.9.0"):
        check(file, TARGETS['gcu'], 13)
    graph.node.append(onnx.helper.make_node('If', ['x'], ['q'], 'choice'))
    with pytest.raises(ExportError, match='branches at choice'):
        check(
            onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid('', 17)]),
            TARGETS['qgis'],
            17,
        )


def test_an_opset_that_the_target_cannot_read_is_an_error() -> None:
    assert choose_opset(TARGETS['gcu'], None, 20) == 13
    assert choose_opset(TARGETS['onnx'], None, 15) == 15
    with pytest.raises(ExportError, match='--opset 17 with --target gcu: expected 13 to 15'):
        choose_opset(TARGETS['gcu'], 17, 20)
    with pytest.raises(ExportError, match='writes up to 15'):
        choose_opset(TARGETS['qgis'], 17, 15)
