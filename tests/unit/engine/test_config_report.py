"""What a config changes against its bases, including from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Tuple

import pytest
from mmengine.config import Config

from mapsage.engine.config.report import (
    MISSING,
    base_files,
    config_differences,
    config_report,
    format_differences,
)

BASE_MODEL = """
norm_cfg = dict(type='SyncBN')
model = dict(type='Seg', backbone=dict(depth=50, norm_cfg=norm_cfg), head=dict(channels=64))
def helper(): pass
hook = dict(fn=lambda x: x)
"""
BASE_SCHEDULE = """
train_cfg = dict(max_iters=80000, val_interval=8000)
pipeline = [dict(type='Load'), dict(type='Crop', crop_size=(512, 512), keep=0.75),
            dict(type='Pack', meta_keys=('path', 'shape'))]
"""
RUN = """
_base_ = ['./base/model.py', './base/schedule.py']
model = dict(backbone=dict(depth=101), head=dict(_delete_=True, width=3))
train_cfg = dict(max_iters=200)
pipeline = [dict(type='Load'), dict(type='Crop', crop_size=(256, 256), keep=0.75),
            dict(type='Pack', meta_keys=['path', 'shape'])]
copied = {{_base_.train_cfg.val_interval}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / 'base').mkdir()
    (tmp_path / 'base' / 'model.py').write_text(BASE_MODEL)
    (tmp_path / 'base' / 'schedule.py').write_text(BASE_SCHEDULE)
    (tmp_path / 'run.py').write_text(RUN)
    return Config.fromfile(str(tmp_path / 'run.py'))


def differences(config: Config) -> Dict[str, Tuple[Any, Any]]:
    return {key: (base, value) for key, base, value in config_differences(config)}


def test_every_change_and_nothing_else(config: Config) -> None:
    found = differences(config)
    pipeline = found.pop('pipeline')
    assert pipeline[0][1]['crop_size'] == (512, 512)
    assert pipeline[1][1]['crop_size'] == (256, 256)
    assert found == {
        'model.backbone.depth': (50, 101),
        'model.head.channels': (64, MISSING),
        'model.head.width': (MISSING, 3),
        'train_cfg.max_iters': (80000, 200),
        'copied': (MISSING, 8000),
    }


def test_command_line_options_are_differences(config: Config) -> None:
    config.merge_from_dict(
        {'train_cfg.val_interval': 10, 'model.backbone.depth': 50, 'env_cfg.accelerator': 'cpu'}
    )
    found = differences(config)
    assert found['train_cfg.val_interval'] == (8000, 10)
    assert 'model.backbone.depth' not in found  # set back to the base's value
    assert found['env_cfg'] == (MISSING, {'accelerator': 'cpu'})


def test_bases_of_bases_are_merged(config: Config, tmp_path: Path) -> None:
    (tmp_path / 'top.py').write_text("_base_ = 'run.py'\ntrain_cfg = dict(max_iters=5)\n")
    top = Config.fromfile(str(tmp_path / 'top.py'))
    assert differences(top) == {'train_cfg.max_iters': (200, 5)}


def test_the_config_itself_is_not_executed_again(config: Config, tmp_path: Path) -> None:
    marks = tmp_path / 'marks'
    (tmp_path / 'noisy.py').write_text(
        f"_base_ = './base/schedule.py'\nwith_side_effect = open({str(marks)!r}, 'a').write('x')\n"
    )
    noisy = Config.fromfile(str(tmp_path / 'noisy.py'))
    before = marks.read_text()
    assert list(differences(noisy)) == ['with_side_effect']
    assert marks.read_text() == before


def test_custom_imports_of_a_base_are_not_run(tmp_path: Path) -> None:
    (tmp_path / 'base.py').write_text("custom_imports = dict(imports=['mapsage_not_there'])\n")
    (tmp_path / 'run.py').write_text("_base_ = './base.py'\nlr = 1\n")
    run = Config.fromfile(str(tmp_path / 'run.py'), import_custom_modules=False)
    assert differences(run) == {'lr': (MISSING, 1)}


def test_a_base_named_by_an_environment_variable(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('SCHEDULE', 'schedule')
    (tmp_path / 'env.py').write_text(
        "_base_ = './base/{{$SCHEDULE:model}}.py'\ntrain_cfg = dict(max_iters=1)\n"
    )
    named = Config.fromfile(str(tmp_path / 'env.py'))
    assert [Path(path).name for path in base_files(named)] == ['schedule.py']
    assert differences(named) == {'train_cfg.max_iters': (80000, 1)}


def test_configs_in_the_pure_python_style(tmp_path: Path) -> None:
    (tmp_path / 'base.py').write_text(
        'from mmengine.runner import IterBasedTrainLoop\n'
        'train_cfg = dict(type=IterBasedTrainLoop, max_iters=100)\n'
    )
    (tmp_path / 'run.py').write_text(
        'from mmengine.config import read_base\nwith read_base():\n'
        "    from .base import *\ntrain_cfg['max_iters'] = 7\n"
    )
    run = Config.fromfile(str(tmp_path / 'run.py'))
    assert differences(run) == {'train_cfg.max_iters': (100, 7)}


@pytest.mark.parametrize(
    'base, value, same',
    [
        ((1, 2), [1, 2], True),
        (1, 1.0, True),
        (1, True, False),
        (float('nan'), float('nan'), True),
        ('1', 1, False),
        ([1, dict(a=(2,))], [1, dict(a=[2])], True),
        ([1], [1, 2], False),
        (None, 0, False),
    ],
)
def test_what_counts_as_equal(tmp_path: Path, base: Any, value: Any, same: bool) -> None:
    (tmp_path / 'base.py').write_text(f"nan = float('nan')\nkey = {base!r}\n")
    (tmp_path / 'run.py').write_text("_base_ = './base.py'\n")
    run = Config.fromfile(str(tmp_path / 'run.py'))
    run.key = value
    assert (differences(run) == {}) is same


def test_report_shows_the_element_that_changed_aligned(config: Config) -> None:
    lines = config_report(config).splitlines()
    assert lines[0].endswith('run.py against base/model.py, base/schedule.py')
    table = {line.split()[0]: line for line in lines[1:]}
    assert table['pipeline[1].crop_size'].split()[1:] == ['(512,', '512)', '->', '(256,', '256)']
    assert table['model.head.channels'].endswith('->  (absent)')
    assert len({line.index('->') for line in lines[1:]}) == 1


def test_long_values_are_shortened() -> None:
    (line,) = format_differences([('key', 'x' * 500, list(range(500)))]).splitlines()
    assert len(line) < 130
    assert '... (500 items)' in line


def test_nothing_to_compare_is_said(tmp_path: Path) -> None:
    alone = tmp_path / 'alone.py'
    alone.write_text('lr = 1\n')
    without_base = Config.fromfile(str(alone))
    assert config_differences(without_base) == []
    assert 'has no _base_' in config_report(without_base)
    in_memory = Config(dict(lr=1))
    assert config_differences(in_memory) == []
    assert 'built in memory' in config_report(in_memory)
    alone.unlink()
    assert 'no longer exists' in config_report(without_base)


def test_an_unchanged_config_says_so(config: Config, tmp_path: Path) -> None:
    (tmp_path / 'same.py').write_text("_base_ = './run.py'\n")
    same = Config.fromfile(str(tmp_path / 'same.py'))
    assert config_report(same).splitlines()[1].strip() == '(no differences)'
