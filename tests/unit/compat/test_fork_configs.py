"""Configs inherit from MMSegmentation's, by package in our tools and by path in any tool."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import mmseg
import pytest
from mmengine.config import Config
from support import ROOT

NAME = 'unet/unet-s5-d16_fcn_4xb4-40k_stare-128x128.py'
SHIPPED = Path(mmseg.__file__).parent / '.mim' / 'configs'


def read(base: str, folder: Path, more: str = '') -> Config:
    path = folder / 'inherits.py'
    path.write_text(f'_base_ = [{base}]\n{more}')
    return Config.fromfile(str(path))


@pytest.mark.parametrize('name', [NAME, '_base_/models/fcn_unet_s5-d16.py'])
def test_a_config_inherits_by_package(name: str, tmp_path: Path) -> None:
    config = read(f"'mmseg::{name}'", tmp_path, 'model = dict(decode_head=dict(num_classes=3))')
    expected = Config.fromfile(str(SHIPPED / name)).model
    assert config.model.decode_head.num_classes == 3
    assert config.model.backbone == expected.backbone


def test_a_config_that_is_not_shipped_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match='models/no_such.py'):
        read("'mmseg::_base_/models/no_such.py'", tmp_path)


def test_the_documented_base_works_without_mapsage(tmp_path: Path) -> None:
    guide = (ROOT / 'docs' / 'reference' / 'config.md').read_text()
    bases = re.findall(r"^_base_ = \[(__import__\('mmseg'\).*)\]$", guide, flags=re.MULTILINE)
    assert len(bases) == 1
    (tmp_path / 'inherits.py').write_text(f'_base_ = [{bases[0]}]\n')
    script = tmp_path / 'stock.py'
    script.write_text(
        'import sys\nfrom mmengine.config import Config\n'
        "print(Config.fromfile(sys.argv[1]).model.type, 'mapsage' in sys.modules)\n"
    )
    # Not the process that has MapSage and its changes to MMEngine in it.
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / 'inherits.py')],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        universal_newlines=True,
    )
    assert done.stdout.splitlines()[-1:] == ['EncoderDecoder False'], done.stdout
