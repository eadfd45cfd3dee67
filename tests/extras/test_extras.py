"""An extra is a folder: what it adds is listed, and without it everything else works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Set

import mmengine.registry
import pytest
from doubles import MAKES
from mmengine.registry import Registry
from ranks import free_port
from support import main_leg, write_tiny_config, write_tiny_data

from mapsage import compat_paths
from mapsage_launcher.extras import FOLDER, accelerators_of_extras, list_extras
from mapsage_launcher.trust.job_secret import SECRET_VARIABLE

pytestmark = main_leg

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = sorted(path.name for path in FOLDER.iterdir() if (path / '__init__.py').is_file())


def registries() -> List[Registry]:
    roots = [value for value in vars(mmengine.registry).values() if isinstance(value, Registry)]
    return roots + [child for root in roots for child in root._children.values()]


def registered_names(extra: str) -> Set[str]:
    return {
        name
        for registry in registries()
        for name, kind in registry.module_dict.items()
        if getattr(kind, '__module__', '').startswith(f'mapsage.extras.{extra}.')
    }


def test_every_folder_is_an_extra() -> None:
    assert list(list_extras()) == EXTRAS


def test_the_list_for_errors_has_everything_that_extras_add() -> None:
    known = json.loads((FOLDER / 'known.json').read_text())
    for name, extra in list_extras().items():
        programs = {row['module'].rpartition('.')[2] for row in extra.commands.values()}
        assert set(known['programs'].get(name, [])) == {*extra.commands, *programs}, name
        devices = {kind.name for kind in accelerators_of_extras()} if extra.accelerators else set()
        expected = registered_names(name) | devices | set(extra.settings)
        assert set(known['names'].get(name, [])) == expected, name


@pytest.mark.long
def test_an_old_path_is_the_new_module() -> None:
    code = f"""import importlib, sys, warnings
import mapsage
for old, new in {compat_paths.MODULES!r}.items():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        module = importlib.import_module(old)
    assert module is sys.modules[new] and module.__spec__.name == new, old
    assert any(old in str(warning.message) for warning in caught), old
"""
    subprocess.run([sys.executable, '-c', code], check=True)


@pytest.mark.parametrize(
    'package, name',
    [(package, name) for package, names in compat_paths.NAMES.items() for name in sorted(names)],
)
def test_an_old_name_is_the_new_one(package: str, name: str) -> None:
    import importlib

    new = getattr(importlib.import_module(compat_paths.NAMES[package][name]), name)
    with pytest.warns(DeprecationWarning, match=name):
        assert getattr(importlib.import_module(package), name) is new


@pytest.fixture(scope='module')
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is installed, and of the import contracts."""
    copy = tmp_path_factory.mktemp('checkout')
    for name in ('mapsage', 'mapsage_launcher', 'configs', 'tools', 'scripts'):
        shutil.copytree(
            ROOT / name, copy / name, ignore=shutil.ignore_patterns('__pycache__', 'node_modules')
        )
    (copy / 'tests').mkdir()
    for path in (ROOT / 'tests').glob('*.py'):
        shutil.copy(path, copy / 'tests')
    for name in ('contract', 'doubles'):
        shutil.copytree(ROOT / 'tests' / name, copy / 'tests' / name)
    return copy


# Imports the package, trains two steps, and asks for a name of the extra.
PROGRAM = """import sys
sys.path.insert(0, sys.argv[1])
import mapsage
assert mapsage.__file__.startswith(sys.argv[1])
from mapsage.commands import cli, options
from mapsage.commands import train
from mapsage.engine.config.mistakes import explain_config_error
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS, TRANSFORMS, DATA_SAMPLERS
train.main([sys.argv[2], '--work-dir', sys.argv[3], '--accelerator', 'cpu',
            '--cfg-options', 'train_cfg.max_iters=2', 'train_cfg.val_interval=2'])
for name in sys.argv[4:]:
    try:
        HOOKS.build(dict(type=name))
    except KeyError as error:
        print('explained:', explain_config_error(error))
"""


# Without tests/conftest.py, which loads the simulator.
CONTRACT_OF_CPU = [
    *'-m pytest tests/contract/test_contract.py --noconftest -q -n 0 -p no:cacheprovider'.split(),
    # The names of some checks have the word, too.
    *('-k', f'cpu and not ({" or ".join([*MAKES, "sim", "xla", "cuda", "gcu"])})'),
]

CONTRACTS = (ROOT / 'pyproject.toml').read_text()


def needing(extra: str) -> List[str]:
    """Return the extras that a line of the contracts lets import an extra, and the extra."""
    return [
        extra,
        *re.findall(rf'"mapsage\.extras\.(\w+)\.\* -> mapsage\.extras\.{extra}\b', CONTRACTS),
    ]


def elsewhere(extras: List[str]) -> List[str]:
    """Return the folders of extras that the launcher has, which may not import mapsage."""
    return ['mapsage_launcher/nodes'] if 'elastic' in extras else []


@contextmanager
def deleted(extras: List[str], checkout: Path, folder: Path) -> Iterator[None]:
    """Move the folders of extras out of the copy while the block runs."""
    paths = [*(f'mapsage/extras/{extra}' for extra in extras), *elsewhere(extras)]
    for path in paths:
        shutil.move(str(checkout / path), str(folder / Path(path).name))
    try:
        yield
    finally:
        for path in paths:
            shutil.move(str(folder / Path(path).name), str(checkout / path))


def contracts_without(extras: List[str]) -> str:
    """Return pyproject.toml without what its contracts say of extras."""
    text = re.sub(rf'"mapsage\.extras\.(?:{"|".join(extras)})\b[^"]*"(, )?', '', CONTRACTS)
    for folder in elsewhere(extras):
        text = text.replace(f'"{folder.replace("/", ".")}", ', '')
    head, *contracts = text.split('[[tool.importlinter.contracts]]')
    gone = ('source_modules = []', 'containers = []')
    kept = [c for c in contracts if not any(line in c for line in gone)]
    return '[[tool.importlinter.contracts]]'.join([head, *kept])


@pytest.mark.parametrize('extra', EXTRAS)
@pytest.mark.long
def test_the_rest_works_without_it(extra: str, checkout: Path, tmp_path: Path) -> None:
    removed = needing(extra)
    with deleted(removed, checkout, tmp_path):
        (checkout / 'pyproject.toml').write_text(contracts_without(removed))
        known: Dict[str, Any] = json.loads((FOLDER / 'known.json').read_text())
        config = write_tiny_config(tmp_path / 'tiny.py', write_tiny_data(tmp_path / 'data'))
        names = sorted(registered_names(extra))[:1]
        run = subprocess.run(
            [
                sys.executable,
                '-c',
                PROGRAM,
                str(checkout),
                str(config),
                str(tmp_path / 'work'),
                *names,
            ],
            capture_output=True,
            text=True,
            cwd=str(checkout),
        )
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
        assert all(
            f'explained: type={name!r}: {name} belongs to the extra {extra!r}' in run.stdout
            for name in names
        )
        contract = subprocess.run(
            [sys.executable, *CONTRACT_OF_CPU],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=str(checkout),
            env={**os.environ, 'PYTHONPATH': f'{checkout}:{checkout / "tests"}'},
        )
        assert contract.returncode == 0, contract.stdout[-3000:]
        assert ' passed' in contract.stdout
        usage = mapsage(checkout, '--help')
        assert usage.returncode == 0
        programs = known['programs'].get(extra, [])
        assert not any(re.search(rf'^  {program} ', usage.stdout, re.M) for program in programs)
        for program in programs[:1]:
            missing = mapsage(checkout, program, 'x')
            assert missing.returncode == 2
            assert f'{program} belongs to the extra {extra!r}' in missing.stderr
        linted = subprocess.run(
            [str(Path(sys.executable).parent / 'lint-imports')],
            capture_output=True,
            text=True,
            cwd=str(checkout),
        )
        assert linted.returncode == 0, linted.stdout


# Builds the config of argv[2] with each setting of argv[3:] in turn.
SETTINGS = """import sys
sys.path.insert(0, sys.argv[1])
from mmengine.config import Config
from mapsage.engine import MapSageRunner
for setting in sys.argv[3:]:
    cfg = Config.fromfile(sys.argv[2])
    cfg.merge_from_dict({setting: True})
    try:
        MapSageRunner.from_cfg(cfg)
    except ValueError as error:
        print(f'{type(error).__name__}: {error}')
"""


@pytest.mark.long
def test_jobs_of_a_fixed_size_start_without_elastic(checkout: Path, tmp_path: Path) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', write_tiny_data(tmp_path / 'data'))
    settings = ['env_cfg.dist_cfg.heartbeat_timeout', 'default_hooks.checkpoint.neighbor_copy']
    with deleted(['elastic'], checkout, tmp_path):
        built = subprocess.run(
            [sys.executable, '-c', SETTINGS, str(checkout), str(config), *settings],
            stdout=subprocess.PIPE,
            universal_newlines=True,
            cwd=str(checkout),
        )
        lines = [line for line in built.stdout.splitlines() if line.startswith('ConfigError')]
        assert len(lines) == len(settings), built.stdout
        for line, setting in zip(lines, settings):
            assert line.startswith(f"ConfigError: {setting} belongs to the extra 'elastic'"), line
        launch = [sys.executable, 'tools/launch.py', '--nproc_per_node', '1']
        elastic = subprocess.run(
            [*launch, '--nnodes', '2:4', 'tools/train.py', str(config)],
            stderr=subprocess.PIPE,
            universal_newlines=True,
            cwd=str(checkout),
        )
        assert elastic.returncode == 1
        assert "NNODES=2:4: NNODES=MIN:MAX belongs to the extra 'elastic'" in elastic.stderr
        store = subprocess.run(
            [sys.executable, 'tools/rendezvous.py'],
            stderr=subprocess.PIPE,
            universal_newlines=True,
            cwd=str(checkout),
        )
        assert store.returncode == 1 and 'mapsage_launcher/nodes' in store.stderr
        work_dir = tmp_path / 'work'
        environ = {
            **os.environ,
            SECRET_VARIABLE: 'ab' * 32,
            'MASTER_ADDR': '127.0.0.1',
            'MASTER_PORT': str(free_port()),
        }
        nodes = [
            subprocess.Popen(
                [
                    *launch,
                    *('--nnodes', '2', '--node_rank', str(node)),
                    *('--master_addr', '127.0.0.1', '--master_port', environ['MASTER_PORT']),
                    *('tools/train.py', str(config), '--launcher', 'pytorch'),
                    *('--accelerator', 'cpu', '--work-dir', str(work_dir)),
                    *('--cfg-options', 'train_cfg.max_iters=2', 'train_cfg.val_interval=2'),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                universal_newlines=True,
                cwd=str(checkout),
                env=environ,
            )
            for node in range(2)
        ]
        texts = [node.communicate(timeout=300)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], texts[0][-3000:] + texts[1][-3000:]
        assert 'world size 2' in texts[0] and (work_dir / 'iter_2.pth').is_file()


def mapsage(checkout: Path, *arguments: str) -> 'subprocess.CompletedProcess[str]':
    code = 'import sys; from mapsage_launcher.command import main; sys.argv[0] = "mapsage"; main()'
    return subprocess.run(
        [sys.executable, '-c', code, *arguments], capture_output=True, text=True, cwd=str(checkout)
    )
