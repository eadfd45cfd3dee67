"""The doctor's report of one process, and what it says about several."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

import cv2
import numpy as np
import pytest
import shapely
from geo_scenes import CLASSES, PALETTE, UTM, rectangle
from geotiff_data import write_scene, write_vector
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from rasterio.transform import Affine
from support import ROOT, write_tiny_config, write_tiny_data

from mapsage.commands import cli
from mapsage.commands import doctor as program
from mapsage.commands.doctor.diagnosis import diagnose
from mapsage.commands.doctor.environment import check_installed
from mapsage.commands.doctor.ranks import compare_reports

LEFTOVERS = dict(RANK='3', WORLD_SIZE='8', LOCAL_RANK='3', MASTER_ADDR='node1', MASTER_PORT='1')


@pytest.fixture(autouse=True)
def _own_environment() -> Any:
    before = dict(os.environ)
    for name in (*LEFTOVERS, 'ACCELERATOR', 'WORK_DIR'):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


def ask(*words: Any) -> Tuple[int, str]:
    """Return the doctor's status and report."""
    said: List[str] = []
    args = cli.build_parser('doctor', needs_config=False).parse_args([str(word) for word in words])
    status = diagnose(args, said.append)
    return status, '\n'.join(said)


def section(report: str, title: str) -> str:
    return re.split(r'\n(?=\S)', report.split(f'\n{title}\n', 1)[1])[0]


def test_without_a_config() -> None:
    status, report = ask('--accelerator', 'cpu')
    assert status == 0 and report.endswith('result: training would start')
    assert 'chosen by name' in section(report, 'accelerators')
    assert 'no       gcu: torch_gcu is not installed' in section(report, 'accelerators')
    assert 'single_device: no launcher' in section(report, 'strategy')
    assert 'ok       backend gloo' in section(report, 'strategy')
    assert 'cpu allocates and computes' in section(report, 'strategy')
    assert 'nothing that contradicts the run' in section(report, 'environment')
    assert 'bash scripts/doctor.sh' in section(report, 'collectives')


def test_with_a_config(tiny_config: Path) -> None:
    status, report = ask(tiny_config, '--accelerator', 'cpu')
    assert status == 0, report
    cfg = Config.fromfile(str(tiny_config))
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = MODELS.build(cfg.model)
    count = sum(parameter.numel() for parameter in model.parameters())
    # weights, gradients and the momentum of SGD, all float32; GroupNorm has no buffers
    needs = f'{count * 3 * 4 / 2**20:.1f} MiB'
    assert f'model EncoderDecoder: {count:,} parameters, {needs} with' in report
    assert f'the model needs {needs} or more' in section(report, 'strategy')
    for loader in ('train', 'val', 'test'):
        assert f'ok       {loader}_dataloader' in section(report, f'config {tiny_config}')


def test_a_mask_of_another_size_is_a_problem(tmp_path: Path) -> None:
    """Also where it belongs to one of the last samples, which take part in no step."""
    data = write_tiny_data(tmp_path / 'data')
    mask = sorted((data / 'ann_dir/train').iterdir())[-1]
    cv2.imwrite(str(mask), np.ones((32, 40), np.uint8))
    status, report = ask(write_tiny_config(tmp_path / 'tiny.py', data), '--accelerator', 'cpu')
    assert status == 1
    assert re.search(
        rf'problem  train_dataloader: .*{mask.name} has 40x32 pixels and image '
        rf'.*{mask.name} 64x64',
        report,
    ), report
    assert 'training would start' not in report


def test_a_pretrained_encoder_at_a_high_rate_is_a_note(tiny_config: Path) -> None:
    high = """
model['backbone'] = dict(type='VisionTransformer', img_size=64, embed_dims=8, num_layers=1,
                         num_heads=1, init_cfg=dict(type='Pretrained', checkpoint='vit.pth'))
model['decode_head'].update(in_index=0)
optim_wrapper = dict(type='AmpOptimWrapper', optimizer=dict(type='AdamW', lr=5e-4))
"""
    tiny_config.write_text(tiny_config.read_text() + high)
    status, report = ask(tiny_config, '--accelerator', 'cpu')
    assert status == 0, report
    note = section(report, f'config {tiny_config}')
    assert (
        'note     the pretrained encoder (VisionTransformer, vit.pth) trains at a learning '
        'rate of 0.0005'
        in note
        and '-> optim_wrapper.paramwise_cfg=' in note
    )


@pytest.mark.parametrize(
    'text, words',
    [
        ('model = dict(', ': this is not valid Python'),
        ('model = 1 / 0', 'cannot be read: ZeroDivisionError: division by zero'),
        (
            "custom_imports = dict(imports=['no_such_module'])",
            'A module of custom_imports must be installed',
        ),
        ("_base_ = ['nowhere.py']", 'inherits from a file that does not exist'),
        ('env_cfg = dict(acelerator=1)', "unknown key 'acelerator'"),
        ('env_cfg = dict(use_model_parallel=2)', 'must be True, False or None, got 2'),
        (
            "env_cfg = dict(use_model_parallel=False)\nmodel_wrapper_cfg = dict(type='MMModelParallel')",
            'contradicts model_wrapper_cfg',
        ),
        ('env_cfg = dict(use_model_parallel=True)', 'needs two or more devices in one process'),
        ("env_cfg = dict(dist_cfg=dict(backend='eccl'))", "backend 'eccl' cannot be used"),
        ("env_cfg = dict(accelerator='tpu')", "unknown accelerator 'tpu'"),
        (
            "model['backbone']['type'] = 'NoSuchNet'",
            "model cannot be built: ConfigError: type='NoSuchNet' is no known model",
        ),
        (
            "model['backbone']['depth'] = 1",
            "model cannot be built: ConfigError: UNet has no setting 'depth'",
        ),
        (
            'train_dataloder = train_dataloader; del train_dataloader',
            "no train_dataloader: a training needs all three. It has the key 'train_dataloder'",
        ),
        (
            "visualizer = dict(type='SegLocalVisualizer', vis_backends=[dict(type='AimVisBackend')])",
            'problem  visualizer.vis_backends: AimVisBackend needs the package aim',
        ),
        ('model = 1', 'model must be a dict, got 1'),
        (
            "train_dataloader['dataset']['data_root'] = 'no_such'",
            'train_dataloader: no_such does not exist',
        ),
        (
            "train_dataloader['dataset'] = dict(type='RepeatDataset', times=2, dataset=dict("
            "type='ConcatDataset', datasets=[dict(data_root='no_such'), dict(ann_file='none.json')]))",
            'train_dataloader: none.json does not exist',
        ),
        (
            "val_dataloader['dataset']['data_prefix']['seg_map_path'] = 'no_masks'",
            'data/no_masks does not exist',
        ),
    ],
)
def test_a_bad_config_is_a_problem_and_no_traceback(
    text: str, words: str, tiny_config: Path, tmp_path: Path
) -> None:
    config = tmp_path / 'bad.py'
    config.write_text(f'{tiny_config.read_text()}\n{text}\n')
    options = [] if 'accelerator' in text else ['--cfg-options', 'env_cfg.accelerator=cpu']
    status, report = ask(config, *options)
    assert status == 1 and 'result: training would not start' in report, report
    line = next(line for line in report.splitlines() if words in line)
    assert line.startswith('  problem  ')
    assert 'Traceback' not in report


def test_missing_test_data_does_not_keep_training(tiny_config: Path, tmp_path: Path) -> None:
    config = tmp_path / 'no_test.py'
    config.write_text(
        tiny_config.read_text()
        + """
test_dataloader = dict(val_dataloader, dataset=dict(val_dataloader['dataset'], data_root='no_such'))
"""
    )
    status, report = ask(config, '--accelerator', 'cpu')
    assert status == 0 and '  note     test_dataloader: no_such does not exist' in report, report


def test_a_missing_config_has_a_suggestion(monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    status, report = ask('configs/demo/efficientnet_lite0_fpn_dem.py')
    assert status == 1
    assert 'Did you mean configs/demo/efficientnet_lite0_fpn_demo.py?' in report


@pytest.mark.parametrize(
    'words, variables, status, said',
    [
        ([], LEFTOVERS, 0, 'note     left over from another launcher, cleared by a run: RANK=3, '),
        ([], dict(LEFTOVERS, TORCHELASTIC_RUN_ID='x'), 1, 'problem  torchrun started 8 processes'),
        (['--launcher', 'pytorch'], {}, 1, "problem  launcher 'pytorch' needs the environment"),
        ([], dict(ECCL_BACKEND='eccl'), 0, 'note     ECCL_BACKEND=eccl: no Enflame software'),
    ],
)
def test_variables_of_a_launcher(
    words: list, variables: Dict[str, str], status: int, said: str
) -> None:
    os.environ.update(variables)
    got, report = ask('--accelerator', 'cpu', *words)
    assert got == status and said in report, report


def install(folder: Path, name: str, version: str) -> None:
    (folder / f'{name.replace("-", "_")}-{version}.dist-info').mkdir(parents=True)
    (folder / f'{name.replace("-", "_")}-{version}.dist-info' / 'METADATA').write_text(
        f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n'
    )


def test_two_packages_of_one_module(monkeypatch: Any, tmp_path: Path) -> None:
    install(tmp_path, 'mmcv-full', '1.7.2')
    before = [finding for finding in check_installed() if finding.level == 'problem']
    assert before == []
    monkeypatch.syspath_prepend(str(tmp_path))
    (problem,) = [finding for finding in check_installed() if finding.level == 'problem']
    assert 'mmcv-full 1.7.2: each brings the module mmcv' in problem.text


def test_a_vendors_module_is_listed(monkeypatch: Any, tmp_path: Path) -> None:
    install(tmp_path, 'torch-gcu', '1.10.0+2.5.136')
    (tmp_path / 'torch_gcu.py').write_text("raise OSError('libtopsrt.so')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ('ok', 'torch_gcu 1.10.0+2.5.136') in [
        (finding.level, finding.text) for finding in check_installed()
    ]
    status, report = ask('--accelerator', 'cpu')
    assert status == 0 and 'no       gcu: torch_gcu is installed but its import fails' in report
    status, report = ask('--accelerator', 'gcu')
    assert status == 1 and 'problem  torch_gcu is installed but its import fails: OSError' in report


def test_without_the_packages(tmp_path: Path) -> None:
    """A Python that lacks MMEngine gets a sentence."""
    (tmp_path / 'mmengine.py').write_text("raise ModuleNotFoundError('No', name='mmengine')")
    done = subprocess.run(
        [sys.executable, str(ROOT / 'tools' / 'doctor.py')],
        stderr=subprocess.PIPE,
        timeout=60,
        universal_newlines=True,
        env={**os.environ, 'PYTHONPATH': str(tmp_path)},
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f'problem: mmengine is not installed in {sys.executable}')


def report(device: str, *problems: str, torch: str = '2', card: Any = None) -> Dict[str, Any]:
    return dict(
        host='node',
        device=device,
        card=card,
        problems=list(problems),
        joins=not problems,
        torch=torch,
        mapsage='0',
    )


@pytest.mark.parametrize(
    'reports, world_size, want',
    [
        (
            {0: report('gcu:0'), 1: report('gcu:1')},
            2,
            [('ok', 'rank 0 on node: gcu:0'), ('ok', 'rank 1 on node: gcu:1')],
        ),
        (
            {0: report('a', 'x'), 1: report('b', 'x', 'y'), 2: report('c', 'y')},
            3,
            [
                ('no', 'rank 0 on node: a, 1 problem(s)'),
                ('no', 'rank 1 on node: b, 2 problem(s)'),
                ('no', 'rank 2 on node: c, 1 problem(s)'),
                ('problem', 'on rank(s) [1, 2]: y'),
            ],
        ),
        (
            {0: report('a'), 2: report('b')},
            3,
            [
                ('problem', 'rank 1 has not reported within 180 s'),
                ('ok', 'rank 0 on node: a'),
                ('ok', 'rank 2 on node: b'),
            ],
        ),
        (
            {0: report('a'), 1: report('b', torch='3')},
            2,
            [
                ('ok', 'rank 0 on node: a'),
                ('ok', 'rank 1 on node: b'),
                ('problem', "torch is 2 on rank 0 and {1: '3'} by rank"),
            ],
        ),
        (
            {0: report('a', card='x'), 1: report('b', card='y'), 2: report('a', card='x')},
            3,
            [
                ('ok', 'rank 0 on node: a'),
                ('ok', 'rank 1 on node: b'),
                ('ok', 'rank 2 on node: a'),
                ('problem', 'ranks [0, 2] are on one card'),
            ],
        ),
    ],
)
def test_reports_of_all_ranks(reports: dict, world_size: int, want: list) -> None:
    assert [(each.level, each.text) for each in compare_reports(reports, world_size)] == want


SCENES = """
_kept = dict(type='GeoTiffDataset', data_root={root!r}, scenes='scenes', labels='labels', window=64,
             bands=[1, 2, 3, 4], metainfo=dict(classes={classes!r}, palette={palette!r}),
             pipeline=[dict(type='LoadGeoTiffWindow'), dict(type='LoadGeoTiffLabels'),
                       dict(type='PackSegInputs')])
train_dataloader.update(dataset=_kept)
val_dataloader.update(dataset=_kept)
test_dataloader = val_dataloader
model['data_preprocessor'] = dict(
    type='BandDataPreProcessor', mean=[100.] * 4, std=[50.] * 4, pad_val=0, seg_pad_val=255,
    size=(64, 64))
model['backbone']['in_channels'] = 4
model['decode_head']['num_classes'] = 3
"""


@pytest.mark.parametrize(
    'text, words',
    [
        ('', ''),
        ("_kept['labels'] = 'label'", r'problem  train_dataloader: .*label'),
        ("_kept['scenes'] = 'scene'", r'problem  train_dataloader: .*scene'),
        ("_kept['bands'] = [1, 2, 3, 5]", r'problem  train_dataloader: .* has no band \[5\]'),
        (
            "model['data_preprocessor'].update(mean=[1.] * 3, std=[1.] * 3)",
            r'problem  train_dataloader: one step .* has the mean \[1.0, 1.0, 1.0\], for 3 channels',
        ),
        ("model['backbone']['in_channels'] = 3", 'problem  train_dataloader: one step .*channels'),
        (
            "_kept['labels'] = 'beside.gpkg'",
            'problem  train_dataloader: .*no polygon .* meets a scene',
        ),
        (
            "model['decode_head']['num_classes'] = 2",
            r'problem  train_dataloader: .*decode_head.*num_classes=2.* 3 classes',
        ),
        (
            "model['decode_head']['num_classes'] = 4",
            r'note     train_dataloader: .*decode_head.*num_classes=4.* 3 classes',
        ),
    ],
)
def test_one_sample_and_one_step_of_each_split(
    text: str, words: str, tiny_config: Path, tmp_path: Path
) -> None:
    write_scene(tmp_path, bands=4, photometric='minisblack')
    write_vector(tmp_path / 'beside.gpkg', [shapely.box(0, 0, 10, 10)], [CLASSES[1]], 'EPSG:32631')
    config = tmp_path / 'scenes.py'
    config.write_text(
        tiny_config.read_text()
        + SCENES.format(root=str(tmp_path), classes=CLASSES, palette=PALETTE)
        + text
    )
    status, report = ask(config, '--accelerator', 'cpu')
    assert status == ('problem' in words), report
    if text:
        assert re.search(words, report), report
    else:
        assert 'ok       train_dataloader: 25 sample(s), one step' in report
        assert 'ok       val_dataloader: 25 sample(s), one prediction' in report


@pytest.mark.parametrize(
    'text, words',
    [
        ("_kept['labels'] = 'label'", 'problem  train_dataloader: .*label'),
        ("_kept['scenes'] = 'scene'", 'problem  train_dataloader: .*scene: no such file'),
        ("_kept['bands'] = [1, 2, 3, 5]", r'problem  train_dataloader: .* has no band \[5\]'),
        (
            "model['data_preprocessor'] = dict(type='SegDataPreProcessor', mean=[1.] * 3, std=[1.] * 3)",
            r'problem  train_dataloader: .*SegDataPreProcessor\) has the mean .* got an image of 4',
        ),
        (
            "_kept['labels'] = 'beside.gpkg'",
            'problem  train_dataloader: .*no polygon .* meets a scene',
        ),
        (
            "_kept['labels'] = 'half.gpkg'",
            r'note     train_dataloader: no polygon lies in 1 of 2 scene\(s\), .*b.tif',
        ),
        (
            "val_dataloader['dataset'] = dict(_kept, split=dict(by='blocks', size=20, part='val'))",
            'note     val_dataloader: split: blocks of 20 meters are 40 pixels, less than a window of 64',
        ),
        (
            "val_dataloader['dataset'] = dict(_kept, windows=dict(type='random'))",
            'problem  val_dataloader: .*is for training; scores need each pixel once',
        ),
    ],
)
def test_what_the_program_says_of_own_scenes(
    text: str, words: str, tiny_config: Path, tmp_path: Path, capsys: Any
) -> None:
    """The mistakes of a user's first hour, by the program that the docs name."""
    write_scene(tmp_path, bands=4, photometric='minisblack')
    write_scene(
        tmp_path,
        'b',
        dict(UTM, transform=UTM['transform'] * Affine.translation(300, 0)),
        bands=4,
        photometric='minisblack',
    )
    write_vector(tmp_path / 'beside.gpkg', [shapely.box(0, 0, 10, 10)], [CLASSES[1]], 'EPSG:32631')
    write_vector(tmp_path / 'half.gpkg', [rectangle(UTM, 0, 0, 60, 60)], [CLASSES[1]], 'EPSG:32650')
    config = tmp_path / 'scenes.py'
    config.write_text(
        tiny_config.read_text()
        + SCENES.format(root=str(tmp_path), classes=CLASSES, palette=PALETTE)
        + text
    )
    status = program.main([str(config), '--accelerator', 'cpu'])
    output = capsys.readouterr().out
    assert re.search(words, output), output
    assert status == words.startswith('problem')
    assert ('result: training would start' in output) == words.startswith('note')
    assert 'Traceback' not in output
