"""Every shipped config: it parses, its model takes a training step, its labels fit."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import DATASETS, MODELS, DefaultScope, init_default_scope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample

import mapsage  # noqa: F401  (registers what the configs name)
from mapsage.datasets import StackDataPreProcessor
from mapsage.extras.earth import dofa, olmoearth, prithvi, terramind
from mapsage.models.backbones.dinov3_weights import ARCHS

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(
    p for p in (ROOT / 'configs').rglob('*.py') if '_base_' not in p.relative_to(ROOT).parts
)
IDS = [str(p.relative_to(ROOT / 'configs')) for p in CONFIGS]

# Mask value that stands for each class; the reason why palettes and masks go out of step is that
# 0 means no data in some sets and background in others.
FIRST_CLASS = {
    'LoveDADataset': (1, 'background'),
    'NWPUPolygonDataset': (0, 'background'),
    'PotsdamDataset': (1, 'impervious_surface'),
    'ISPRSDataset': (1, 'impervious_surface'),
    'iSAIDDataset': (0, 'background'),
    'GeoTiffDataset': (0, 'background'),
    'ChangeDataset': (0, 'unchanged'),
    'SceneStackDataset': (0, 'fallow', 'background', 'land', 'not burned'),
}

EARTH_ARCHS = dict(
    OlmoEarth=olmoearth.ARCHS, TerraMind=terramind.ARCHS, DOFA=dofa.ARCHS, PrithviEO=prithvi.ARCHS
)


@pytest.fixture(scope='module', params=CONFIGS, ids=IDS)
def cfg(request: pytest.FixtureRequest) -> Config:
    with DefaultScope.overwrite_default_scope(None):
        return Config.fromfile(str(request.param))


def test_configs_were_found() -> None:
    assert {p.parent.name for p in CONFIGS} >= {'demo', 'nwpu', 'loveda', 'dinov3', 'geotiff'}


def test_inheritance_is_one_level_deep() -> None:
    for path in (ROOT / 'configs' / '_base_').rglob('*.py'):
        assert '_base_ =' not in path.read_text(), path


@pytest.mark.parametrize('path', CONFIGS, ids=IDS)
def test_header_states_command_hardware_and_score(path: Path) -> None:
    text = path.read_text()
    assert all(f'\n{word}:' in text for word in ('Command', 'Hardware', 'Score'))
    assert path.name in text or 'start_8card_training.sh\n' in text


def test_runner_settings(cfg: Config) -> None:
    assert cfg.runner_type == 'MapSageRunner'
    assert cfg.custom_imports.imports == ['mapsage']
    assert cfg.env_cfg.dist_cfg.backend == 'auto'
    assert cfg.param_scheduler[-1].end == cfg.train_cfg.max_iters
    assert cfg.train_cfg.max_iters % cfg.default_hooks.checkpoint.interval == 0
    assert {b.type for b in cfg.visualizer.vis_backends} == {
        'LocalVisBackend',
        'TensorboardVisBackend',
    }
    assert cfg.tta_model.type == 'SegTTAModel' and cfg.tta_pipeline


def reduced(model: Dict[str, Any]) -> Dict[str, Any]:
    """The model of a config for 64x64 crops, a DINOv3 with true depth and 32 channels."""
    model = dict(model, data_preprocessor=dict(model['data_preprocessor'], size=(64, 64)))
    backbone = model['backbone']
    if backbone['type'] == 'DINOv3ViT' and isinstance(backbone['arch'], str):
        whole = ARCHS[backbone['arch']]
        arch = whole._replace(embed_dims=32, num_heads=2, feedforward_channels=64)
        model = narrowed(model, whole.embed_dims, 32)
        if 'num_heads' in model['decode_head']:
            model['decode_head']['num_heads'] = 2
        model['backbone'] = dict(backbone, arch=dict(arch._asdict()), init_cfg=None)
    encoder = EARTH_ARCHS.get(backbone['type'], {}).get(str(backbone.get('arch')))
    if encoder is not None:
        model = narrowed(model, encoder.embed_dims, 32)
        # Two dates, because attention over twelve takes minutes.
        sensors = {
            name: dict(sensor, max_dates=min(sensor.get('max_dates', 1), 2))
            for name, sensor in backbone['sensors'].items()
        }
        model['data_preprocessor'] = dict(model['data_preprocessor'], sensors=sensors)
        model['backbone'] = dict(
            backbone,
            init_cfg=None,
            sensors=sensors,
            arch=dict(encoder._asdict(), embed_dims=32, num_layers=4, num_heads=2),
        )
    return model


def narrowed(value: Any, wide: int, narrow: int) -> Any:
    """A config in which every width ``wide`` is ``narrow``."""
    if isinstance(value, dict):
        return {key: narrowed(each, wide, narrow) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(narrowed(each, wide, narrow) for each in value)
    return narrow if value == wide else value


def labeled(dataset: Any) -> Any:
    """The config of the labeled dataset itself."""
    while dataset.type in ('NamedSamples', 'SemiSupervisedDataset'):
        dataset = dataset.dataset if dataset.type == 'NamedSamples' else dataset.labeled
    return dataset


def test_one_training_step(cfg: Config) -> None:
    init_default_scope('mmseg')
    torch.manual_seed(0)
    model = revert_sync_batchnorm(MODELS.build(reduced(cfg.model.to_dict())))
    model.train()
    classes = cfg.model.decode_head.num_classes
    labels = torch.randint(0, classes, (2, 1, 64, 64))
    labels[0, :, :8] = 255
    samples = [SegDataSample(gt_sem_seg=PixelData(data=label)) for label in labels]
    bands = cfg.model.backbone.get('in_channels', 3)
    layout = (
        model.data_preprocessor.layout
        if isinstance(model.data_preprocessor, StackDataPreProcessor)
        else None
    )
    bands = bands if layout is None else layout.image_channels
    images = [torch.randint(0, 256, (bands, 64, 64), dtype=torch.uint8) for _ in samples]
    if layout is not None:
        # Encoders check units: reflectances are large, and backscatter is negative somewhere.
        low, high = (0, 2) if cfg.model.data_preprocessor.get('mean') else (-30, 4000)
        images = [torch.randint(low, high, (bands, 64, 64)).float() for _ in samples]
        for image, sample in zip(images, samples):
            image[layout.pixel_channels :] = 1
            sample.set_metainfo(dict(days=[45000] * layout.dates, site=(15.0, 48.0)))
    batch = model.data_preprocessor(dict(inputs=images, data_samples=samples), training=True)
    loss, _ = model.parse_losses(model(**batch, mode='loss'))
    loss.backward()
    assert torch.isfinite(loss) and loss > 0
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_masks_classes_and_palette_agree(cfg: Config) -> None:
    """Through the loader of the config: mask value, class index, name and color."""
    init_default_scope('mmseg')
    source = labeled(cfg.train_dataloader.dataset)
    folders: Dict[str, Any] = dict(data_root=str(ROOT))
    if source.type != 'ChangeDataset':
        folders['data_prefix'] = dict(img_path='')  # iSAID's must exist
    dataset = DATASETS.build(dict(source, lazy_init=True, pipeline=[], **folders))
    classes: List[str] = list(dataset.metainfo['classes'])
    palette = dataset.metainfo['palette']
    assert len(classes) == len(palette) == cfg.model.decode_head.num_classes
    assert len(set(map(tuple, palette))) == len(palette)
    value, *names = FIRST_CLASS[source.type]
    assert classes[0] in names
    assert dataset.reduce_zero_label == (value == 1)


def lists_of(value: Any) -> List[str]:
    """The lists of labeled images that a config names, and whether it excludes them."""
    if isinstance(value, dict):
        mine = (
            [f'{value["names"]} {value.get("exclude", False)}']
            if value.get('type') == 'NamedSamples'
            else []
        )
        return mine + [each for part in value.values() for each in lists_of(part)]
    return []


@pytest.mark.parametrize('folder, longest', [('demo', 48), ('nwpu', 40)])
def test_configs_with_few_labels_read_the_list_of_their_name(folder: str, longest: int) -> None:
    for count in (16, longest):
        configs = sorted((ROOT / 'configs' / folder).glob(f'*_{folder}_{count}*.py'))
        assert len(configs) == 3  # labels alone, FixMatch, with channel dropout
        for path in configs:
            found = lists_of(Config.fromfile(str(path)).train_dataloader.dataset.to_dict())
            listed = str(ROOT / 'configs' / folder / 'splits' / f'labeled_{count}.txt')
            assert found == [f'{listed} {exclude}' for exclude in (False, True)[: len(found)]]
            assert len(found) == 1 + ('fixmatch' in path.name)


@pytest.mark.parametrize('folder, longest', [('demo', 48), ('nwpu', 40)])
def test_a_shorter_list_of_labeled_images_begins_the_longer_one(folder: str, longest: int) -> None:
    def named(count: int) -> List[str]:
        path = ROOT / 'configs' / folder / 'splits' / f'labeled_{count}.txt'
        return [line for line in path.read_text().splitlines() if line and line[0] != '#']

    names = named(longest)
    assert named(16) == names[:16] and len(set(names)) == longest
    hashes = [hashlib.sha256(f'mapsage {name}'.encode()).digest() for name in names]
    assert hashes == sorted(hashes)


def test_demo_values_are_loveda_class_names() -> None:
    from mmseg.datasets import LoveDADataset

    from mapsage.extras.demo import ground_canvas

    for index, name in enumerate(LoveDADataset.METAINFO['classes']):
        assert getattr(ground_canvas, name.upper()) == index + 1


def test_palette_reaches_the_drawn_polygon(tmp_path: Path) -> None:
    """NWPU: a polygon of category 'ship' becomes class 2, whose name and color are the ship's."""
    from mapsage.datasets import LoadPolygonAnnotations, NWPUPolygonDataset

    index: Dict[str, int] = {n: i for i, n in enumerate(NWPUPolygonDataset.METAINFO['classes'])}
    square = np.array([[1.0, 1.0], [4.0, 1.0], [4.0, 4.0], [1.0, 4.0]])
    results = LoadPolygonAnnotations().transform(
        dict(
            img_path='x',
            img_id=1,
            mask_shape=(8, 8),
            label_map=None,
            seg_fields=[],
            polygons=[(index['ship'], [square])],
        )
    )
    assert set(np.unique(results['gt_seg_map'])) == {0, 2}
    assert NWPUPolygonDataset.METAINFO['palette'][2] == [0, 130, 200]
