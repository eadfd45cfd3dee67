"""Every shipped segmentor for every target, from its config to what old runtimes compute."""

from __future__ import annotations

import json
import re
import subprocess
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import cv2
import mmseg
import numpy as np
import pytest
import torch
from geotiff_data import CLASSES as SCENE_CLASSES
from geotiff_data import write_scene as write_bands
from mask_models import ARCH
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmseg.structures import SegDataSample
from support import ON_MAIN_LEG, ROOT, main_leg, on_host

onnx = pytest.importorskip('onnx')
pytest.importorskip('onnxruntime')

from mapsage.commands.cli import build_model  # noqa: E402
from mapsage.extras.export import export as command  # noqa: E402
from mapsage.extras.export.graph import open_session  # noqa: E402
from mapsage.extras.export.targets import TARGETS  # noqa: E402
from mapsage.maps.exported import ExportedModel  # noqa: E402
from mapsage.maps.file_inputs import IMAGE  # noqa: E402

pytestmark = on_host

SIDE = 64
CONFIGS = ROOT / 'configs'
STOCK = Path(mmseg.__file__).parent / '.mim' / 'configs' / '_base_' / 'models'
DIMS = ARCH['embed_dims']
VIT = dict(arch=dict(_delete_=True, **ARCH), out_indices=(0, 1, 2, 3))
UPERNET = dict(
    backbone=VIT, neck=dict(embed_dim=DIMS), decode_head=dict(in_channels=[DIMS] * 4, channels=16)
)
QUERIES = dict(in_channels=DIMS, num_queries=9)
RESNET = dict(
    pretrained=None,
    data_preprocessor=dict(size=(SIDE, SIDE)),
    backbone=dict(depth=18, base_channels=8, stem_channels=8),
)
ONE_OUTPUT = dict(
    num_classes=2,
    out_channels=1,
    threshold=0.4,
    align_corners=True,
    loss_decode=dict(_delete_=True, type='CrossEntropyLoss', use_sigmoid=True),
)

# Name: config, what makes it small or another one, number of classes.
SEGMENTORS: Dict[str, Tuple[Path, Dict[str, Any], int]] = {
    'efficientnet fpn': (CONFIGS / 'demo/efficientnet_lite0_fpn_demo.py', {}, 7),
    'four bands of 16 bits': (CONFIGS / 'geotiff/efficientnet_lite0_fpn_geotiff.py', {}, 3),
    'one output, corners aligned': (
        CONFIGS / 'demo/efficientnet_lite0_fpn_demo.py',
        dict(decode_head=ONE_OUTPUT),
        2,
    ),
    'dinov3 and linear': (
        CONFIGS / 'dinov3/vit_l_web_frozen_linear_loveda.py',
        dict(
            backbone=dict(VIT, out_indices=(3,)), decode_head=dict(in_channels=DIMS, channels=DIMS)
        ),
        7,
    ),
    'four levels and linear': (
        CONFIGS / 'demo/vit_tiny_frozen_demo.py',
        dict(backbone=VIT, decode_head=dict(in_channels=[DIMS] * 4, channels=4 * DIMS)),
        7,
    ),
    'dinov3 and fcn': (
        CONFIGS / 'dinov3/vit_tiny_nwpu.py',
        dict(
            backbone=VIT,
            neck=dict(embed_dim=DIMS),
            decode_head=dict(in_channels=[DIMS] * 4, channels=4 * DIMS),
        ),
        7,
    ),
    'dinov3 and upernet': (CONFIGS / 'dinov3/vit_l_web_frozen_upernet_loveda.py', UPERNET, 7),
    'dinov3 with lora': (CONFIGS / 'dinov3/vit_l_sat_lora_upernet_loveda.py', UPERNET, 7),
    'lora in a stock transformer': (
        CONFIGS / 'demo/vit_tiny_lora_demo.py',
        dict(
            backbone=dict(embed_dims=48, img_size=SIDE),
            decode_head=dict(in_channels=[48] * 4, channels=192),
        ),
        7,
    ),
    'eomt': (
        CONFIGS / 'demo/eomt_tiny_demo.py',
        dict(backbone=dict(VIT, out_indices=(3,)), decode_head=QUERIES),
        7,
    ),
    'pmt': (
        CONFIGS / 'demo/pmt_tiny_frozen_demo.py',
        dict(backbone=VIT, decode_head=dict(QUERIES, in_channels=[DIMS] * 4, num_heads=2)),
        7,
    ),
    'stock fcn': (
        STOCK / 'fcn_r50-d8.py',
        dict(
            RESNET,
            decode_head=dict(in_channels=64, channels=8),
            auxiliary_head=dict(in_channels=32, channels=8),
        ),
        5,
    ),
    'stock upernet, corners aligned': (
        STOCK / 'upernet_r50.py',
        dict(
            RESNET,
            decode_head=dict(in_channels=[8, 16, 32, 64], channels=8, align_corners=True),
            auxiliary_head=dict(in_channels=32, channels=8),
        ),
        5,
    ),
}
LINES = """
_base_ = [{base!r}]
custom_imports = dict(imports=['mapsage'])
default_scope = 'mmseg'
model = {model!r}
test_pipeline = {pipeline!r}
val_dataloader = dict(_delete_=True, dataset={dataset!r})
test_dataloader = val_dataloader
"""


def kind(model: Dict[str, Any]) -> Tuple[Any, ...]:
    """Return what of a model's config decides which code is exported."""

    def name(part: Any) -> Any:
        return part and part.get('type')

    backbone = model['backbone']
    return (
        model['type'],
        name(model['data_preprocessor']),
        name(backbone),
        backbone.get('of'),
        bool(backbone.get('lora')),
        name(model.get('neck')),
        name(model['decode_head']),
        model['decode_head'].get('input_transform'),
        backbone.get('in_channels', 3),
    )


@main_leg
def test_every_shipped_config_has_a_segmentor_here() -> None:
    known = {kind(Config.fromfile(str(path)).model) for path, *_ in SEGMENTORS.values()}
    # tests/extras/export/test_module.py exports models of several dates.
    shipped = [
        path
        for path in sorted(CONFIGS.glob('*/*.py'))
        if path.parent.name not in ('_base_', 'change', 'earth', 'stacks')
    ]
    assert len(shipped) > 30
    missing = [path.name for path in shipped if kind(Config.fromfile(str(path)).model) not in known]
    assert not missing, 'add these to SEGMENTORS'


def write_data(folder: Path, name: str, classes: int) -> Tuple[Dict[str, Any], List[Any]]:
    """Write three images with labels; return the dataset and its pipeline."""
    if name == 'four bands of 16 bits':
        steps: List[Any] = [
            dict(type='LoadGeoTiffWindow'),
            dict(type='LoadGeoTiffLabels'),
            dict(type='PackSegInputs'),
        ]
        write_bands(folder, bands=4, values='uint16')
        return dict(
            type='GeoTiffDataset',
            data_root=str(folder),
            scenes='scenes',
            labels='labels',
            window=SIDE,
            pipeline=steps,
            metainfo=dict(classes=SCENE_CLASSES),
        ), steps
    steps = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations'),
        dict(type='PackSegInputs'),
    ]
    rng = np.random.default_rng(0)
    for number in range(3):
        for kind_of_file, shape, most in (('img', (80, 70, 3), 256), ('ann', (80, 70), classes)):
            (folder / kind_of_file).mkdir(parents=True, exist_ok=True)
            cv2.imwrite(
                str(folder / kind_of_file / f'{number}.png'), rng.integers(0, most, shape, np.uint8)
            )
    return dict(
        type='BaseSegDataset',
        data_root=str(folder),
        img_suffix='.png',
        seg_map_suffix='.png',
        pipeline=steps,
        data_prefix=dict(img_path='img', seg_map_path='ann'),
        metainfo=dict(classes=tuple(f'class {number}' for number in range(classes))),
    ), steps


def write_config(folder: Path, name: str) -> Path:
    base, changes, classes = SEGMENTORS[name]
    dataset, steps = write_data(folder / 'data', name, classes)
    heads = {
        head: dict(changes.get(head, {}), num_classes=classes)
        for head in ('decode_head', 'auxiliary_head')
        if head in Config.fromfile(str(base)).model
    }
    path = folder / 'small.py'
    path.write_text(
        LINES.format(base=str(base), model={**changes, **heads}, pipeline=steps, dataset=dataset)
    )
    return path


def write_checkpoint(config: Path) -> Path:
    """Write weights at which every part matters, and classes are far apart."""
    torch.manual_seed(0)
    model = revert_sync_batchnorm(build_model(Config.fromfile(str(config))))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(('gamma_1', 'gamma_2')) or not tensor.any():
                tensor.normal_(std=0.3)
        for module in model.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                module.running_mean.normal_(std=0.1)
                module.running_var.uniform_(0.5, 1.5)
        spread_logits(model.eval())
    path = config.with_suffix('.pth')
    torch.save(dict(state_dict=model.state_dict(), meta={}), path)
    return path


def spread_logits(model: Any) -> None:
    """Let the logits of a head per pixel have mean 0 and deviation 2 on an image of noise."""
    last = getattr(model.decode_head, 'conv_seg', None)
    if last is None:
        return
    bands = getattr(model.data_preprocessor, 'mean', torch.zeros(3)).numel()
    image = torch.rand(bands, SIDE, SIDE) * (255 if bands == 3 else 4000)
    logits = model(
        **model.data_preprocessor(dict(inputs=[image], data_samples=[SegDataSample()])),
        mode='tensor',
    )
    factor = 2 / logits.std((0, 2, 3))
    last.weight *= factor[:, None, None, None]
    last.bias.copy_((last.bias - logits.mean((0, 2, 3))) * factor)


@pytest.fixture(scope='module')
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return a function that exports a segmentor for a target, once, and returns the file."""
    folder = tmp_path_factory.mktemp('models')
    models: Dict[str, Tuple[Path, Path]] = {}

    def export(name: str, target: str) -> Path:
        place = folder / name
        path = place / f'{target}.onnx'
        if name not in models:
            place.mkdir()
            config = write_config(place, name)
            models[name] = config, write_checkpoint(config)
        if not path.exists():
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')
                command.main(
                    [
                        *map(str, models[name]),
                        '--out',
                        str(path),
                        '--target',
                        target,
                        '--window',
                        str(SIDE),
                        '--tiles',
                        '4',
                    ]
                )
        return path

    return export


@pytest.mark.parametrize('target', TARGETS)
@pytest.mark.parametrize('name', SEGMENTORS)
def test_a_segmentor_proves_its_export(name: str, target: str, made: Any, capsys: Any) -> None:
    if not ON_MAIN_LEG and target != 'gcu':
        pytest.skip('the main leg runs this; a T20 machine writes files for gcu')
    path = made(name, target)
    said = capsys.readouterr().out
    proof = re.search(
        r'4 tiles of the val set: largest difference (\S+), equal pixels (\S+) %, '
        r'mIoU (\S+) \(PyTorch\) and (\S+) \(ONNX Runtime\)',
        said,
    )
    assert proof, said
    difference, equal, before, after = map(float, proof.groups())
    assert difference < 1e-4 and equal > 99.9 and abs(before - after) < 0.05, said
    file, aim = onnx.load(path), TARGETS[target]
    assert (file.ir_version, file.opset_import[0].version, len(file.opset_import)) == (
        aim.ir,
        min(aim.opset, 20),
        1,
    )
    description = json.loads({each.key: each.value for each in file.metadata_props}['mapsage'])
    bands, scores = (4 if name == 'four bands of 16 bits' else 3), description['scores']
    first = aim.batch or 'batch'
    for value, channels in ((file.graph.input[0], bands), (file.graph.output[0], scores)):
        sides = [side.dim_param or side.dim_value for side in value.type.tensor_type.shape.dim]
        assert sides == [first, channels, SIDE, SIDE]
    shown = open_session(path.read_bytes()).run(None, {IMAGE: image_for(file)})[0]
    assert np.ptp(shown, axis=(0, 2, 3)).max() > 0.05, 'scores that hardly vary prove nothing'


def image_for(file: Any) -> np.ndarray:
    batch, *sides = [side.dim_value for side in file.graph.input[0].type.tensor_type.shape.dim]
    return np.random.default_rng(3).random((batch or 3, *sides)).astype(np.float32)


READER = """
import sys
import numpy
import onnxruntime
print(onnxruntime.__version__)
for path in sys.argv[1:]:
    session = onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider'])
    image = numpy.load(path + '.npy')
    numpy.save(path + '.out.npy', session.run(None, {session.get_inputs()[0].name: image})[0])
"""


@main_leg
@pytest.mark.parametrize(
    'leg, version, target', [('ort117', '1.17.0', 'qgis'), ('ort19', '1.9.0', 'gcu')]
)
def test_the_oldest_runtime_of_a_target_computes_the_same(
    leg: str, version: str, target: str, made: Any
) -> None:
    ready = subprocess.run(
        ['bash', str(ROOT / 'scripts' / 'setup_env.sh'), leg], capture_output=True, text=True
    )
    if ready.returncode:
        pytest.skip(f'no environment with ONNX Runtime {version}: {ready.stderr[-400:]}')
    paths = [made(name, target) for name in SEGMENTORS]
    for path in paths:
        np.save(f'{path}.npy', image_for(onnx.load(path)))
    read = subprocess.run(
        [ready.stdout.strip(), '-c', READER, *map(str, paths)], capture_output=True, text=True
    )
    assert read.returncode == 0, read.stderr
    assert read.stdout.split() == [version]
    for path in paths:
        wanted = open_session(path.read_bytes()).run(None, {IMAGE: np.load(f'{path}.npy')})[0]
        assert np.abs(np.load(f'{path}.out.npy') - wanted).max() < 1e-4, path


@main_leg
@pytest.mark.parametrize('name', SEGMENTORS)
def test_openvino_computes_the_same(name: str, made: Any) -> None:
    pytest.importorskip('openvino')
    path = made(name, 'onnx')
    bands = onnx.load(path).graph.input[0].type.tensor_type.shape.dim[1].dim_value
    windows = (
        np.random.default_rng(5)
        .integers(0, 256, (2, bands, SIDE, SIDE))
        .astype(np.uint8 if bands == 3 else np.float32)
    )
    ours, theirs = (
        ExportedModel(str(path), runtime)(windows) for runtime in ('onnxruntime', 'openvino')
    )
    assert np.abs(ours - theirs).max() < 1e-4
