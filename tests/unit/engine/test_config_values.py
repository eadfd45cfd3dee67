"""Every mistake of ``mistakes.tsv`` ends in its sentence before anything is built, in the doctor too."""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any, List, Optional

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import CheckpointHook
from safetensors.torch import save_file

from mapsage.base.errors import UserError
from mapsage.commands import options
from mapsage.commands.cli import load_config
from mapsage.commands.doctor.config import check_keys
from mapsage.engine.config import check_config, monitored_mistake, value_mistakes
from mapsage.engine.config.values import folder_obstacle
from mapsage.engine.env_cfg import ConfigError
from mapsage.evaluation import ConfusionMatrixMetric, SingleClassBaseline

CONFIG = """custom_imports = dict(imports=['mapsage'])
classes = ('ground', 'house')
train_pipeline = [
    dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'),
    dict(type='RandomCrop', crop_size=(64, 64)),
    dict(type='RandomFlip', prob=0.5), dict(type='PackSegInputs')]
test_pipeline = [
    dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), dict(type='PackSegInputs')]
dataset = dict(
    type='BaseSegDataset', data_root='data',
    metainfo=dict(classes=classes, palette=[[1,2,3],[4,5,6]]))
train_dataloader = dict(
    batch_size=2, num_workers=0, sampler=dict(type='InfiniteSampler'),
    dataset=dict(**dataset, pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=1, num_workers=0, sampler=dict(type='DefaultSampler'),
    dataset=dict(**dataset, pipeline=test_pipeline))
default_hooks = dict(checkpoint=dict(type='CheckpointHook'), logger=dict(type='LoggerHook'))
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-3))
train_cfg = dict(type='IterBasedTrainLoop', max_iters=8, val_interval=4)
model = dict(decode_head=dict(num_classes=len(classes)))
val_evaluator = dict(type='ConfusionMatrixMetric')
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, begin=0, end=2, by_epoch=False),
    dict(type='PolyLR', begin=2, end=8, by_epoch=False)]
randomness = dict(seed=0)

# The line numbers of the table count the lines above.
val_cfg = dict()
"""
ROWS = [
    line.split('\t')
    for line in (Path(__file__).parent / 'mistakes.tsv').read_text(encoding='utf-8').splitlines()
    if not line.startswith('#')
]


def read(tmp_path: Path, text: str = CONFIG, *arguments: str) -> Config:
    """Return the config of a text, as a training reads it."""
    path = tmp_path / 'config.py'
    path.write_text(text, encoding='utf-8')
    parser = options.build_parser('')
    given: List[str] = ['--cfg-options', *arguments] if arguments else []
    cfg = load_config(parser.parse_args([str(path), '--work-dir', str(tmp_path / 'run'), *given]))
    check_config(cfg, values=True)
    return cfg


def test_the_config_of_the_table_is_right(tmp_path: Path) -> None:
    assert list(value_mistakes(read(tmp_path))) == []


@pytest.mark.parametrize('name, edit, sentence, before', ROWS, ids=[row[0] for row in ROWS])
def test_mistake(tmp_path: Path, name: str, edit: str, sentence: str, before: str) -> None:
    text, arguments = CONFIG, [edit]
    if '=>' in edit:
        old, new = edit.split('=>')
        assert CONFIG.count(old.strip()) >= 1
        text, arguments = CONFIG.replace(old.strip(), new.strip(), 1), []
    with pytest.raises(UserError) as caught:
        read(tmp_path, text, *arguments)
    assert sentence in str(caught.value)


def test_the_doctor_says_the_same(tmp_path: Path) -> None:
    cfg = read(tmp_path)
    cfg.train_cfg.val_interval = 0
    texts = [finding.text for finding in check_keys(cfg) if finding.level == 'problem']
    assert texts == list(value_mistakes(cfg)) and 'val_interval=0' in texts[0]


@pytest.mark.parametrize('value', ['a', '5', '=5'])
def test_option_without_key_or_value(value: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        options.build_parser('').parse_args(['config.py', '--cfg-options', value])
    assert f'--cfg-options {value}: expected KEY=VALUE' in capsys.readouterr().err


@pytest.mark.parametrize(
    'value', ["[dict(a='b', c=1)]", 'dict(a=1)', "[{'a': 1}]", '[1,2', '[f(a=1,b=2)]']
)
def test_option_that_is_no_list_of_values(value: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        options.build_parser('').parse_args(['config.py', '--cfg-options', 'a=1', f'x={value}'])
    assert f'--cfg-options x={value}: expected a number, a text' in capsys.readouterr().err


def test_options_of_other_values() -> None:
    texts = ['a.b=(1,(2,x))', 'name=it_{}.pth', 'folder=data (1', 'c=None', 'd=[]']
    texts += ['e={:03d}.pth', 'f=run(lr=1)']
    args = options.build_parser('').parse_args(['config.py', '--cfg-options', *texts])
    assert args.cfg_options == {
        'a.b': (1, (2, 'x')),
        'name': 'it_{}.pth',
        'folder': 'data(1',
        'c': None,
        'd': [],
        'e': '{:03d}.pth',
        'f': 'run(lr=1)',
    }


@pytest.mark.parametrize('name', ['tile.png', 'folder'])
def test_what_is_no_config(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.mkdir() if name == 'folder' else path.write_bytes(b'\x89PNG')
    with pytest.raises(UserError, match='is a folder, expected' if name == 'folder' else 'is no c'):
        load_config(options.build_parser('').parse_args([str(path)]))


def test_work_dir_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / 'file').write_text('')
    with pytest.raises(ConfigError, match='file is a file. Expected a folder'):
        check_config(dict(work_dir=str(tmp_path / 'file' / 'below')), values=True)
    assert folder_obstacle(str(tmp_path / 'new' / 'folder')) is None


def test_weights_that_are_no_checkpoint(tmp_path: Path) -> None:
    path, whole = tmp_path / 'a.pth', io.BytesIO()
    torch.save(dict(a=torch.ones(9)), whole)
    for content, obstacle in (
        (b'<!DOCTYPE html>', "begins with b'<!DOCTYPE html>'"),
        (b'version https://git-lfs', 'begins with'),
        (b'', 'is empty'),
        (whole.getvalue()[:-100], 'is truncated'),
    ):
        path.write_bytes(content)
        mistake = f'load_from={str(path)!r} {obstacle}'
        with pytest.raises(ConfigError, match=re.escape(mistake) + '.*expected the path or URL'):
            check_config(dict(load_from=str(path)), values=True)
    with pytest.raises(ConfigError, match='is not a file: expected the path or URL'):
        check_config(dict(load_from=str(tmp_path)), values=True)


@pytest.mark.parametrize('name', ['zip.pth', 'pickle.pth', 'plain.pkl', 'a.safetensors'])
def test_weights_of_every_format(tmp_path: Path, name: str) -> None:
    path, weights = tmp_path / name, dict(a=torch.ones(9))
    if name == 'a.safetensors':
        save_file(weights, str(path))
    elif name == 'plain.pkl':
        path.write_bytes(pickle.dumps(weights, 2))
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=name == 'zip.pth')
    check_config(dict(load_from=str(path)), values=True)


@pytest.mark.parametrize(
    'save_best, sentence',
    [
        ('miou', "save_best='miou': no metric of val_evaluator gives this score. Did you mean"),
        ('loss', 'Expected one of aAcc, mIoU, mAcc, single_class_mIoU.'),
        ('mIoU', None),
        ('auto', None),
        (['mIoU', 'aAcc'], None),
    ],
)
def test_score_that_no_metric_gives(save_best: Any, sentence: Optional[str]) -> None:
    metrics = [ConfusionMatrixMetric(), SingleClassBaseline()]
    text = monitored_mistake([CheckpointHook(save_best=save_best, rule='greater')], metrics)
    assert (text is None) if sentence is None else (sentence in str(text))
