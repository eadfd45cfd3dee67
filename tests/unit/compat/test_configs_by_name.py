"""A config inherits from one that comes with MapSage by its name, in a checkout as in a wheel."""

from __future__ import annotations

from pathlib import Path

import pytest
from mmengine.config import Config
from support import ROOT

from mapsage.commands import list_configs
from mapsage.engine.config.file import read_config_file
from mapsage.engine.config.report import config_differences
from mapsage.engine.env_cfg import ConfigError

DEMO = 'demo/efficientnet_lite0_fpn_demo.py'


@pytest.mark.parametrize('name', [DEMO, f'configs/{DEMO}'])
def test_a_config_inherits_from_a_shipped_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file of this name in the folder of the user's is not meant.
    (tmp_path / 'demo').mkdir()
    (tmp_path / DEMO).write_text('')
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'mine.py').write_text(f"_base_ = ['mapsage::{name}']\nmax_iters = 7\n")
    cfg = read_config_file(tmp_path / 'mine.py')
    shipped = Config.fromfile(ROOT / 'configs' / DEMO)
    assert cfg.max_iters == 7 and cfg.model == shipped.model
    assert '_scope_' not in cfg.pretty_text
    assert config_differences(cfg) == [('max_iters', 200, 7)]


def test_a_name_that_no_config_has_is_an_error_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / 'mine.py').write_text("_base_ = ['mapsage::demo/efficientnet_lite_fpn_demo.py']\n")
    with pytest.raises(ConfigError, match=f'Did you mean {DEMO}'):
        read_config_file(tmp_path / 'mine.py')


def test_all_settings_of_one_config_are_shown(capsys: pytest.CaptureFixture) -> None:
    list_configs.main([DEMO, '--show'])
    text = capsys.readouterr().out
    assert Config.fromstring(text, '.py').model.decode_head.num_classes > 1
    assert '_base_' not in text
    with pytest.raises(SystemExit):
        list_configs.main(['no_such', '--show'])
    assert '--show no_such: config file no_such does not exist' in capsys.readouterr().err
