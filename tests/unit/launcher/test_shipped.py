"""Configs that come with MapSage are found by name and copied; nothing is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest
from mmengine.config import Config
from support import ROOT

from mapsage.engine.config.file import read_config_file
from mapsage.extras.elastic.node_settings import code_digest
from mapsage_launcher import shipped
from mapsage_launcher.shipped import (
    ShippedError,
    copy_config,
    copy_configs,
    find_config,
    list_configs,
)

NAME = 'demo/efficientnet_lite0_fpn_demo_48.py'


@pytest.mark.parametrize('name', [NAME, f'configs/{NAME}', str(ROOT / 'configs' / NAME)])
def test_a_shipped_config_is_found_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config(name) == ROOT / 'configs' / NAME


def test_a_file_of_the_user_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'demo').mkdir()
    (tmp_path / NAME).write_text('')
    assert find_config(NAME) == Path(NAME)


@pytest.mark.parametrize(
    'name, near',
    [
        ('demo/efficientnet_lite0_fpn_demo48.py', NAME),
        ('/no/such.py', None),
        ('../pyproject.toml', None),
        ('demo', None),
    ],
)
def test_what_is_no_config_is_refused(
    name: str, near: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ShippedError, match='does not exist') as caught:
        find_config(name)
    assert near is None or f'Did you mean {near}?' in str(caught.value)
    assert 'tools/list_configs.py` lists' in str(caught.value)


def test_each_config_has_a_line() -> None:
    found = list_configs()
    assert len(found) > 30 and all(found.values())
    assert not any(name.startswith('_base_') for name in found)


def test_a_copy_is_read_as_the_original_is(tmp_path: Path) -> None:
    folder = tmp_path / '配置 1'
    new = copy_configs(str(folder))
    assert len(new) == len(set(new)) and all(Path(name).is_file() for name in new)
    for name in ('demo/efficientnet_lite0_fpn_demo.py', 'dinov3/vit_tiny_nwpu.py'):
        copied, original = (
            Config.fromfile(str(root / name)) for root in (folder, ROOT / 'configs')
        )
        assert copied.to_dict() == original.to_dict()
    names = Config.fromfile(str(folder / NAME)).train_dataloader.dataset.names
    assert Path(names).is_file() and folder in Path(names).parents
    assert copy_configs(str(folder)) == []  # again: nothing is left to do


@pytest.mark.parametrize(
    'name', ['loveda/efficientnet_lite0_fpn_loveda.py', 'demo/eomt_tiny_demo.py']
)
def test_a_copy_of_one_inherits_from_the_shipped_files(name: str, tmp_path: Path) -> None:
    copied = Path(copy_config(name, str(tmp_path / '配置')))
    assert [copied] == list((tmp_path / '配置').iterdir())
    assert "'mapsage::" in copied.read_text(encoding='utf-8')
    original = read_config_file(ROOT / 'configs' / name)
    assert read_config_file(copied).to_dict() == original.to_dict()
    with pytest.raises(ShippedError, match='is there. Nothing is copied'):
        copy_config(name, str(tmp_path / '配置'))


def test_lists_that_a_config_reads_come_with_its_copy(tmp_path: Path) -> None:
    names = read_config_file(Path(copy_config(NAME, str(tmp_path)))).train_dataloader.dataset.names
    assert Path(names).is_file() and tmp_path in Path(names).parents
    with pytest.raises(ShippedError, match='does not exist'):
        copy_config('demo/none.py', str(tmp_path))


def test_a_changed_copy_is_kept(tmp_path: Path) -> None:
    (tmp_path / NAME).parent.mkdir()
    (tmp_path / NAME).write_text('mine = 1\n')
    with pytest.raises(ShippedError, match='differs.*Nothing is copied'):
        copy_configs(str(tmp_path))
    assert (tmp_path / NAME).read_text() == 'mine = 1\n'
    assert [path for path in tmp_path.rglob('*') if path.is_file()] == [tmp_path / NAME]


def test_texts_name_what_is_typed_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = 'bash scripts/test.sh X; python tools/prepare_data.py; scripts/start_8card_training.sh Y'
    assert shipped.name_installed_commands(text) == (
        'bash scripts/test.sh X; python tools/prepare_data.py; '
        'bash scripts/start_8card_training.sh Y'
    )
    monkeypatch.setattr(shipped, 'SHIPPED', tmp_path)  # without links, as in a wheel
    assert (
        shipped.name_installed_commands(text) == 'mapsage launch test X; mapsage prepare; '
        'mapsage launch Y'
    )


def test_a_wheel_and_a_checkout_have_the_same_digest(tmp_path: Path) -> None:
    (tmp_path / 'a.py').write_text('a = 1\n')
    before = code_digest(tmp_path)
    (tmp_path / '.mim' / 'tools').mkdir(parents=True)
    (tmp_path / '.mim' / 'tools' / 'train.py').write_text('b = 1\n')
    assert code_digest(tmp_path) == before
    (tmp_path / 'a.py').write_text('a = 2\n')
    assert code_digest(tmp_path) != before
