"""The sampling library with torch and NumPy and nothing else: imported, and in the plain example.

The environment holds the wheel, and links to the packages that torch and NumPy need.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any, List, Set

import pytest
import torch
from support import ROOT, main_leg
from test_wheel import Installed, wheel  # noqa: F401

pytestmark = main_leg
MODULES = 42


def needed(name: str, names: Set[str]) -> Set[str]:
    """Return a distribution and the ones that it needs, of those that are installed."""
    if name not in names:
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            return names
        names.add(name)
        for requirement in requirements:
            if 'extra ==' not in requirement:
                needed(re.split(r'[^A-Za-z0-9_.-]', requirement)[0], names)
    return names


@pytest.fixture(scope='module')
def alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:  # noqa: F811
    installed = Installed(wheel, tmp_path_factory.mktemp('sampling') / 'env', hosts=False)
    packages = installed.package.parent
    for name in needed('torch', needed('numpy', set())):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] != '..'}:
            if top != '__pycache__' and not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    return installed


def environ() -> dict:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(('MAPSAGE', 'PYTHONPATH', 'PJRT', 'ACCELERATOR'))
    }
    return dict(kept, OMP_NUM_THREADS='1', MAPSAGE_SECRET=os.urandom(32).hex())


@pytest.mark.long
def test_it_loads_few_modules_and_no_package_but_torch_and_numpy(alone: Installed) -> None:
    code = 'import sys, torch, numpy, mapsage.sampling; print(*sys.modules)'
    done = subprocess.run(
        [str(alone.python), '-X', 'importtime', '-c', code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        env=environ(),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.rsplit('|', 1)[1].strip() for line in done.stderr.split('\n') if '|' in line]
    # The import times lack modules that `importlib.import_module` loads.
    ours = [
        name
        for name in done.stdout.split()
        if name.split('.')[0] in ('mapsage', 'mapsage_launcher')
    ]
    assert 20 < len(ours) <= MODULES, ours
    after = lines[next(index for index, name in enumerate(lines) if name in ours) :]
    # Besides torch and NumPy only the standard library, whose modules have no distribution.
    installed = {path.name.split('.')[0].split('-')[0] for path in alone.package.parent.iterdir()}
    assert not [
        name
        for name in after
        if name.split('.')[0] in installed
        and name.split('.')[0] not in ('mapsage', 'mapsage_launcher', 'torch', 'numpy')
    ]


class Run:
    """The plain example on two ranks."""

    def __init__(self, alone: Installed, *arguments: Any) -> None:
        with socket.socket() as probe:
            probe.bind(('127.0.0.1', 0))
            port = str(probe.getsockname()[1])
        self.ranks = [
            subprocess.Popen(
                [str(alone.python), str(ROOT / 'examples' / 'plain_ddp.py'), *map(str, arguments)],
                env=dict(
                    environ(),
                    MASTER_ADDR='127.0.0.1',
                    MASTER_PORT=port,
                    RANK=str(rank),
                    WORLD_SIZE='2',
                    MAPSAGE_SECRET='of this test' * 4,
                ),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                universal_newlines=True,
            )
            for rank in range(2)
        ]

    def finish(self) -> List[str]:
        outputs = [rank.communicate(timeout=300)[0] for rank in self.ranks]
        assert [rank.returncode for rank in self.ranks] == [0, 0], '\n'.join(outputs)[-3000:]
        return outputs

    def kill(self) -> None:
        for rank in self.ranks:
            rank.send_signal(signal.SIGKILL)
        for rank in self.ranks:
            rank.communicate()


@pytest.mark.long
def test_the_plain_example_is_killed_and_resumed_to_the_same_bits(
    alone: Installed, tmp_path: Path
) -> None:
    output = Run(alone, '--work-dir', tmp_path / 'whole').finish()[0]
    rewards = re.findall(r'expected reward ([0-9.]+)', output)
    assert len(rewards) == 4 and float(rewards[-1]) > 0.5 > float(rewards[0])
    # It would not end within this test.
    killed = Run(alone, '--work-dir', tmp_path / 'cut', '--steps', 10**6)
    deadline = time.monotonic() + 250
    while not (tmp_path / 'cut' / 'latest').exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    killed.kill()
    step = int((tmp_path / 'cut' / 'latest').read_text().split('_')[1])
    if step >= 40:  # this machine was quick: continue from an earlier checkpoint
        (tmp_path / 'cut' / 'latest').write_text('step_30')
    resumed = Run(alone, '--work-dir', tmp_path / 'cut', '--resume').finish()[0]
    assert 'step 10:' not in resumed
    whole, cut = (tmp_path / run / 'step_40' for run in ('whole', 'cut'))
    for name in ('shared.pt', 'rank_0.pt', 'rank_1.pt'):
        assert same(torch.load(str(whole / name)), torch.load(str(cut / name))), name
    shutil.rmtree(str(tmp_path / 'cut'))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other
