"""A wheel that is built from the checkout, installed elsewhere, does what the checkout does.

The wheel is real, and so is the environment that it is installed in. The leg's packages come in by
a .pth file, since they take minutes to install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
from support import ROOT

from mapsage.extras.demo import DemoParams, write_demo_data
from mapsage.version import __version__

BYTES = 3_000_000
SOURCES = (
    'mapsage',
    'mapsage_launcher',
    'configs',
    'tools',
    'scripts',
    'pyproject.toml',
    'README.md',
    'LICENSE',
)
SDIST = 'import hatchling.build as backend; backend.build_sdist("../sdist")'
PRINT = (
    '#!/bin/sh\necho "ran <$*> in <$(pwd)>"; echo then "<"$MAPSAGE_THEN">"; '
    'echo first "<"$MAPSAGE_FIRST">"\n'
)


def check_call(*command: Any, folder: Path) -> None:
    done = subprocess.run(
        list(map(str, command)),
        cwd=str(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope='module')
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a source distribution of a copy of the checkout."""
    folder = tmp_path_factory.mktemp('build')
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                str(ROOT / name),
                str(folder / 'copy' / name),
                symlinks=True,
                ignore=shutil.ignore_patterns('node_modules'),
            )
        else:
            shutil.copy(str(ROOT / name), str(folder / 'copy'))
    check_call(sys.executable, '-c', SDIST, folder=folder / 'copy')
    (source,) = (folder / 'sdist').glob('*.tar.gz')
    check_call(
        sys.executable,
        '-m',
        'pip',
        'wheel',
        '--no-deps',
        '--no-build-isolation',
        '-w',
        folder / 'dist',
        source,
        folder=folder,
    )
    (found,) = (folder / 'dist').glob('*.whl')
    return found


class Installed:
    """An environment with the wheel alone, or with the packages of this leg too."""

    def __init__(self, wheel: Path, folder: Path, hosts: bool) -> None:
        check_call(sys.executable, '-m', 'venv', '--without-pip', folder, folder=wheel.parent)
        self.python = folder / 'bin' / 'python'
        check_call(
            sys.executable,
            '-m',
            'pip',
            '--python',
            self.python,
            'install',
            '--no-deps',
            wheel,
            folder=wheel.parent,
        )
        packages = next((folder / 'lib').glob('python*/site-packages'))
        self.package = packages / 'mapsage'
        if hosts:
            (packages / 'leg.pth').write_text(sysconfig.get_paths()['purelib'] + '\n')

    def run(self, *words: Any, folder: Path, **variables: Any) -> Tuple[int, str]:
        """Run `mapsage` in a folder; return its status and what it printed."""
        # without the fork server of this session, which has imported the checkout
        environ: Dict[str, str] = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(('MAPSAGE', 'PYTHONPATH', 'WORK_DIR', 'ACCELERATOR', 'PJRT'))
        }
        environ.update({name: str(value) for name, value in variables.items()})
        done = subprocess.run(
            [str(self.python.with_name('mapsage')), *map(str, words)],
            cwd=str(folder),
            timeout=500,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
        )
        return done.returncode, done.stdout


@pytest.fixture(scope='module')
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(wheel, tmp_path_factory.mktemp('installed') / 'env', hosts=True)


@pytest.fixture(scope='module')
def alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(wheel, tmp_path_factory.mktemp('alone') / 'env', hosts=False)


def test_what_is_in_the_wheel(wheel: Path) -> None:
    assert wheel.stat().st_size <= BYTES
    with zipfile.ZipFile(str(wheel)) as archive:
        names = set(archive.namelist())
    for folder, pattern in (('configs', '**/*.py'), ('configs', '**/*.txt'), ('tools', '*.py')):
        for path in (ROOT / folder).glob(pattern):
            assert f'mapsage/.mim/{path.relative_to(ROOT).as_posix()}' in names
    for package in ('mapsage', 'mapsage_launcher'):
        for path in (ROOT / package).rglob('*.py'):
            assert path.relative_to(ROOT).as_posix() in names
    assert {
        'mapsage/extras/viewer/web/viewer.js',
        'mapsage/extras/viewer/web/LICENSES.txt',
        'mapsage/extras/viewer/extra.json',
        'mapsage/extras/known.json',
        'mapsage/py.typed',
        'mapsage/extras/simulator/backend.cpp',
        'mapsage/extras/simulator/narrowing.h',
        'mapsage_launcher/command.py',
        'mapsage/extras/forensics/operators/s60_torch_gcu_2.10.txt',
    } <= names
    unwanted = ('tests/', 'benchmarks', 'node_modules', '__pycache__', 'run_tests', 'accept_')
    assert not [name for name in names if any(word in name for word in unwanted)]


def test_the_command_alone(alone: Installed, tmp_path: Path) -> None:
    status, output = alone.run('--help', folder=tmp_path)
    assert status == 0 and 'mapsage launch' in output and 'browse_dataset' in output
    assert 'tools/' not in output and 'scripts/' not in output
    assert alone.run(folder=tmp_path) == (2, output)
    assert alone.run('--version', folder=tmp_path) == (0, f'mapsage {__version__}\n')
    status, output = alone.run('trian', folder=tmp_path)
    assert status == 2 and 'Did you mean mapsage train?' in output
    for word in ('../tools/train', 'benchmarks/metric', '_hosts'):
        assert alone.run(word, folder=tmp_path)[0] == 2
    status, output = alone.run('launch', '--help', folder=tmp_path)
    assert status == 0 and '  mapsage launch [CONFIG] [options of mapsage train]\n' in output
    assert 'scripts/' not in output and 'NPROC_PER_NODE' in output


def test_without_its_packages_it_says_what_to_type(alone: Installed, tmp_path: Path) -> None:
    for words in (
        ['train', 'x.py'],
        ['launch'],
        ['doctor'],
        ['predict', 'x.py', 'x.pth', 'x.tif'],
        ['export'],
        ['suggest'],
        ['plot-sampling'],
    ):
        status, output = alone.run(*words, folder=tmp_path)
        assert status == 1 and 'needs torch, mmengine, mmcv, mmseg, not installed' in output
        (line,) = (each for each in output.split('\n') if each.startswith('    '))
        assert (
            line.startswith(f'    {alone.python} -m pip install ')
            or f"{alone.python.resolve().name} -m pip install 'mapsage[" in line
        )
        assert 'Traceback' not in output


def test_configs_alone(alone: Installed, tmp_path: Path) -> None:
    status, output = alone.run('configs', '--help', folder=tmp_path)
    assert status == 0 and output.startswith('usage: mapsage configs [-h]')
    assert 'examples:\n  mapsage configs  ' in output and 'tools/' not in output
    status, output = alone.run('configs', 'geotiff', folder=tmp_path)
    assert (status, output.split('\n')[0]) == (0, 'geotiff/efficientnet_lite0_fpn_geotiff.py')
    status, output = alone.run('configs', 'no_such', folder=tmp_path)
    assert status == 1 and "no config has 'no_such' in its name" in output
    for said in ('files written', 'already complete'):
        status, output = alone.run('configs', '--copy', 'mine', folder=tmp_path)
        assert status == 0 and said in output
    copied, shipped = (
        sorted(path.relative_to(folder) for path in folder.rglob('*.py'))
        for folder in (tmp_path / 'mine', ROOT / 'configs')
    )
    assert copied == shipped


def test_what_the_launcher_starts(installed: Installed, tmp_path: Path) -> None:
    python = tmp_path / 'python'
    python.write_text(PRINT)
    python.chmod(0o755)
    shipped = installed.package / '.mim'

    def lines(*words: str, **variables: str) -> List[str]:
        status, output = installed.run(
            'launch', *words, folder=tmp_path, MAPSAGE_PYTHON=python, **variables
        )
        assert status == 0, output
        return output.split('\n')

    demo = lines('--resume')  # data and results belong to the current folder
    assert f'{shipped}/tools/launch.py' in demo[0] and demo[0].endswith(f'in <{tmp_path}>')
    assert f'{shipped}/configs/demo/efficientnet_lite0_fpn_demo.py --launcher' in demo[0]
    assert demo[1].startswith(f'then <{shipped}/tools/demo.py map work_dirs/')
    assert demo[2] == f'first <{shipped}/tools/demo.py data data/demo>'
    other = lines('loveda/efficientnet_lite0_fpn_loveda.py', ACCELERATOR='cpu')
    assert f'{shipped}/configs/loveda/efficientnet_lite0_fpn_loveda.py ' in other[0]
    assert '--accelerator cpu' in other[0] and other[1] == 'then <>'
    assert (
        '/tools/predict.py mine/mine.py --launcher pytorch a.pth b.tif>'
        in lines('predict', 'mine/mine.py', 'a.pth', 'b.tif')[0]
    )
    assert (
        f'/tools/doctor.py {shipped}/configs/nwpu/'
        in lines('doctor', 'nwpu/efficientnet_lite0_fpn_nwpu.py')[0]
    )


@pytest.mark.long
def test_training_a_map_and_its_page(installed: Installed, tmp_path: Path) -> None:
    """From the wheel to the page, with ranks that start cold; it takes half a minute on its own."""
    folder = tmp_path / '地 图'
    folder.mkdir()
    write_demo_data(folder / 'data', DemoParams(train_scenes=1, val_scenes=1, scene_size=256))
    (folder / 'where.py').write_text('import mapsage\nopen("where", "a").write(mapsage.__file__)\n')
    status, output = installed.run(
        'launch',
        '--work-dir',
        'work',
        '--cfg-options',
        'train_cfg.max_iters=1',
        'train_cfg.val_interval=1',
        'default_hooks.checkpoint.interval=1',
        "custom_imports.imports=['mapsage','where']",
        folder=folder,
        MAPSAGE_DEMO='data',
        NPROC_PER_NODE=2,
        OMP_NUM_THREADS=1,
        ACCELERATOR='cpu',
        PYTHONPATH=folder,
    )
    assert status == 0, output
    assert 'world size 2' in output and (folder / 'work' / 'preview.png').is_file()
    where = (folder / 'where').read_text()
    assert str(installed.package) in where and str(ROOT) not in where
    assert (folder / 'work' / 'map' / 'scene.tif').is_file()
    assert 'mapsage view work/map --truth data/scene_label.tif --reduce-zero-label' in output
    status, output = installed.run('view', 'work/map', '--static', 'site', folder=folder)
    assert status == 0 and (folder / 'site' / 'index.html').is_file(), output
