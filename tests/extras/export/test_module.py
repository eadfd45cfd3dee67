"""Models of scene stacks as ONNX files: ONNX Runtime computes the same from inputs by sensor."""

from __future__ import annotations

import datetime
from typing import Any, Dict

import numpy as np
import pytest
import torch
from earth_states import fill
from mask_models import build
from support import ON_MAIN_LEG

onnx = pytest.importorskip('onnx')
pytest.importorskip('onnxruntime')

from mapsage.accelerator import resolve_accelerator  # noqa: E402
from mapsage.extras.export.errors import ExportError  # noqa: E402
from mapsage.extras.export.graph import most_opset, open_session, trace  # noqa: E402
from mapsage.extras.export.module import StackToScores, with_gaps  # noqa: E402
from mapsage.extras.export.proof import Tile, prove  # noqa: E402
from mapsage.extras.export.targets import TARGETS, choose_opset, choose_target  # noqa: E402
from mapsage.geo.stacks import StackLayout  # noqa: E402
from mapsage.maps.description import Bands, ExportedDescription  # noqa: E402
from mapsage.maps.file_inputs import StackInputs  # noqa: E402
from mapsage.maps.predictor import WindowPredictor  # noqa: E402

SIDE = 32
DIMS = 32
SENSORS: Dict[str, Dict[str, Any]] = dict(
    s2=dict(bands=['B02', 'B03', 'B04', 'B8A'], max_dates=3),
    s1=dict(bands=['vv', 'vh'], max_dates=2),
)
OPTICAL = dict(s2=SENSORS['s2'])
ARCH: Dict[str, Any] = dict(embed_dims=DIMS, num_layers=2, num_heads=2)
RESNET = dict(
    type='ResNetV1c',
    depth=18,
    base_channels=8,
    num_stages=2,
    strides=(1, 2),
    dilations=(1, 1),
    out_indices=(0, 1),
    stem_channels=8,
    norm_cfg=dict(type='GN', num_groups=4),
)
NORMALIZED = dict(
    mean=dict(s2=[2000.0] * 4, s1=[-12.0] * 2), std=dict(s2=[900.0] * 4, s1=[3.0] * 2)
)


def pooled(pool: str) -> Dict[str, Any]:
    encoders = {
        name: dict(RESNET, in_channels=len(sensor['bands'])) for name, sensor in SENSORS.items()
    }
    return dict(
        data_preprocessor=dict(
            type='StackDataPreProcessor',
            sensors=SENSORS,
            size=(SIDE, SIDE),
            test_cfg=dict(size_divisor=24),
            **NORMALIZED,
        ),
        backbone=dict(type='StackBackbone', sensors=SENSORS, encoder=encoders),
        neck=dict(
            type='TemporalPool',
            sensors=SENSORS,
            channels=[8, 16],
            pool=pool,
            attention=dict(heads=4, width=16),
        ),
        decode_head=head([40, 80] if pool == 'concat' else [16, 32]),
    )


def as_channels() -> Dict[str, Any]:
    bands = sum(len(sensor['bands']) * sensor['max_dates'] for sensor in SENSORS.values())
    model = dict(
        pooled('mean'),
        decode_head=head([8, 16]),
        backbone=dict(
            type='StackBackbone',
            sensors=SENSORS,
            dates='channels',
            encoder=dict(RESNET, in_channels=bands),
        ),
    )
    del model['neck']
    return model


def earth(kind: str, sensors: Dict[str, Dict[str, Any]], **settings: Any) -> Dict[str, Any]:
    arch = dict(ARCH, pixel_channels=4) if kind == 'OlmoEarth' else ARCH
    return dict(
        data_preprocessor=dict(type='StackDataPreProcessor', sensors=sensors, size=(SIDE, SIDE)),
        backbone=dict(type=kind, sensors=sensors, arch=arch, out_indices=(0, 1), **settings),
        decode_head=head([DIMS, DIMS]),
    )


def head(channels: Any) -> Dict[str, Any]:
    return dict(
        type='FCNHead',
        in_channels=channels,
        in_index=[0, 1],
        input_transform='resize_concat',
        channels=16,
        num_convs=1,
        concat_input=False,
        dropout_ratio=0.0,
        num_classes=3,
        norm_cfg=dict(type='GN', num_groups=4),
        align_corners=False,
    )


MODELS: Dict[str, Dict[str, Any]] = {
    **{pool: pooled(pool) for pool in ('attention', 'mean', 'max', 'concat')},
    'channels': as_channels(),
    'OlmoEarth': earth('OlmoEarth', SENSORS, patch_size=8),
    'TerraMind': earth('TerraMind', SENSORS),
    'PrithviEO': earth('PrithviEO', OPTICAL),
    'DOFA': earth('DOFA', OPTICAL, mean=dict(s2=[2000.0] * 4), std=dict(s2=[900.0] * 4)),
}
# They know the days.
KNOWS_DAYS = ('attention', 'OlmoEarth', 'PrithviEO')


def windows(layout: StackLayout) -> np.ndarray:
    """Return four windows: complete, with gaps, empty, and of another place."""
    random = np.random.RandomState(0)
    days = [
        (datetime.date(2024, month, 9) - datetime.date(1899, 12, 31)).days for month in (2, 5, 8)
    ]
    windows = []
    for site in ((11.5, 48.1), (11.5, 48.1), (float('nan'),) * 2, (-70.0, -33.0)):
        image = random.normal(-12, 3, (layout.image_channels, SIDE, SIDE)).astype(np.float32)
        image[layout.channels['s2'].pixels] = random.randint(
            1, 4000, image[layout.channels['s2'].pixels].shape
        )
        image[layout.pixel_channels :] = 1
        windows.append(
            layout.append_planes(
                image, [day for sensor in layout.sensors for day in days[: sensor.max_dates]], site
            )
        )
    windows[1] = with_gaps(layout, windows[1])
    windows[2][: layout.input_channels - 2] = 0
    return np.stack(windows)


@pytest.mark.parametrize('name', MODELS)
def test_a_file_computes_the_same_with_missing_dates_and_clouds(
    name: str, mmseg_scope: Any
) -> None:
    target = TARGETS['onnx' if ON_MAIN_LEG else 'gcu']
    if not ON_MAIN_LEG and name not in ('attention', 'OlmoEarth', 'PrithviEO'):
        pytest.skip('the main leg runs this; PyTorch 1.10 takes 10 s and more for a file')
    config = MODELS[name]
    model = fill(build(dict(config, type='EncoderDecoder', test_cfg=dict(mode='whole'))))
    layout = model.data_preprocessor.layout
    resolve_accelerator('cpu')
    reference = WindowPredictor(model, torch.device('cpu'), (SIDE, SIDE), 0, 1)
    description = ExportedDescription(
        ('a', 'b', 'c'),
        ((0, 0, 0),) * 3,
        Bands(layout.input_channels, False),
        SIDE,
        8,
        target.batch,
        3,
        0.5,
        '',
        target.name,
        '',
        dict(type='SceneStackDataset', training_days={}, sensors=config['backbone']['sensors']),
    )
    batch = windows(layout)
    expected = reference(torch.from_numpy(batch[:1]))
    module = StackToScores(model, layout, SIDE, list(batch[:2])).eval()
    file = trace(module, target, choose_opset(target, None, most_opset()), target.batch)
    proof = prove(
        file,
        description,
        reference,
        [Tile(window, np.zeros((SIDE, SIDE), np.int64)) for window in batch],
    )
    assert proof.largest < 1e-5 and proof.equal > 0.999, proof
    assert (np.ptp(expected, axis=(0, 2, 3)) > 0.02).any(), 'scores that hardly vary prove nothing'
    inputs = StackInputs(layout, SIDE)
    assert [value.name for value in file.graph.input] == list(inputs.shapes)
    # Where nothing is valid, any value may stand.
    session, values = open_session(file.SerializeToString()), inputs.of_windows(batch[1:2])
    scores = session.run(None, values)[0]
    values['s2_pixels'][
        np.broadcast_to(values['s2_valid'][:, :, None] == 0, values['s2_pixels'].shape)
    ] = float('nan')
    assert np.array_equal(session.run(None, values)[0], scores)
    values['s2_days'] += 90 * (values['s2_days'] > 0)
    other_days = session.run(None, values)[0]
    assert (np.abs(other_days - scores).max() > 1e-4) == (name in KNOWS_DAYS)
    values['site'][:] = 100, 10
    assert np.array_equal(session.run(None, values)[0], other_days) == (name != 'PrithviEO')


def test_the_inputs_are_the_window() -> None:
    layout = StackLayout.of_config(SENSORS)
    batch = windows(layout)
    inputs = StackInputs(layout, SIDE).of_windows(batch)
    assert {name: values.shape for name, values in inputs.items()} == dict(
        s1_pixels=(4, 2, 2, SIDE, SIDE),
        s1_valid=(4, 2, SIDE, SIDE),
        s1_days=(4, 2),
        s2_pixels=(4, 3, 4, SIDE, SIDE),
        s2_valid=(4, 3, SIDE, SIDE),
        s2_days=(4, 3),
        site=(4, 2),
    )
    assert all(values.dtype == np.float32 for values in inputs.values())
    stack = layout.split(torch.from_numpy(batch))
    for name, images in stack.sensors.items():
        assert np.array_equal(inputs[f'{name}_pixels'], images.pixels)
        assert np.array_equal(inputs[f'{name}_valid'], images.valid)
        assert np.array_equal(inputs[f'{name}_days'], images.days)
    assert np.array_equal(
        inputs['site'], torch.stack([stack.longitude, stack.latitude], 1), equal_nan=True
    )


def test_gaps_are_a_date_and_a_cloud() -> None:
    layout = StackLayout.of_config(SENSORS)
    before = windows(layout)[0]
    stack = layout.split(torch.from_numpy(with_gaps(layout, before)[None]))
    for sensor in layout.sensors:
        images = stack.sensors[sensor.name]
        assert images.days[0, -1] == 0 and (images.days[0, :-1] > 0).all()
        assert not images.valid[0, -1].any() and not images.pixels[0, -1].any()
        assert images.valid[0, 0].float().mean() == 0.75
    assert before[layout.channels['s2'].valid].all(), 'the window itself is not changed'


def test_the_target_of_a_stack_is_not_qgis() -> None:
    assert [choose_target(None, is_stack).name for is_stack in (False, True)] == ['qgis', 'onnx']
    assert choose_target('gcu', True).name == 'gcu' and choose_target('qgis', False).name == 'qgis'
    with pytest.raises(ExportError, match='Deepness plugin reads images of one date'):
        choose_target('qgis', True)
