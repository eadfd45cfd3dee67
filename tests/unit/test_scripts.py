"""Which programs the shell scripts start, and how. A stand-in for Python prints its arguments."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, List

import pytest
from support import ROOT

PRINT = (
    '#!/bin/sh\nprintf "ran"; printf " <%s>" "$@"; echo; echo first "<"$MAPSAGE_FIRST">"; '
    'echo then "<"$MAPSAGE_THEN">"\n'
)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Return a function that runs a script in a folder and returns its status and lines."""
    python = tmp_path / 'python'
    python.write_text(PRINT)
    python.chmod(0o755)

    def start(script: Path, *arguments: Any, folder: Path = ROOT, **variables: str) -> Any:
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(('SLURM', 'MAPSAGE', 'WORK_DIR', 'ACCELERATOR'))
        }
        done = subprocess.run(
            ['bash', str(script), *map(str, arguments)],
            cwd=str(folder),
            timeout=60,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
            env={
                **environ,
                'MAPSAGE_PYTHON': str(python),
                'PATH': f'{tmp_path}:{os.environ["PATH"]}',
                **variables,
            },
        )
        return done.returncode, done.stdout

    return start


START = ROOT / 'scripts' / 'start_8card_training.sh'
DEMO = ROOT / 'configs' / 'demo' / 'efficientnet_lite0_fpn_demo.py'


@pytest.mark.parametrize(
    'folder, config, demo',
    [
        (ROOT, None, True),
        (ROOT, 'configs/demo/efficientnet_lite0_fpn_demo.py', True),
        (ROOT / 'configs', 'demo/efficientnet_lite0_fpn_demo.py', True),
        (ROOT, DEMO, True),
        (ROOT / 'configs' / 'demo', 'efficientnet_lite0_fpn_demo.py', True),
        (ROOT / 'scripts', 'configs/demo/efficientnet_lite0_fpn_demo.py', True),
        (ROOT / 'scripts', 'demo/efficientnet_lite0_fpn_demo.py', True),
        (ROOT, 'configs/loveda/efficientnet_lite0_fpn_loveda.py', False),
    ],
)
def test_the_demo_is_known_by_its_folder(run: Any, folder: Path, config: Any, demo: bool) -> None:
    status, output = run(START, *([config] if config else []), folder=folder)
    assert status == 0
    first, then = output.splitlines()[-2:]
    assert ('tools/demo.py data data/demo>' in first) == demo
    mapped = (
        'map work_dirs/efficientnet_lite0_fpn_demo/efficientnet_lite0_fpn_demo.py data/demo/scene'
    )
    assert (f'tools/demo.py {mapped}.tif>' in then) == demo
    assert demo or (first, then) == ('first <>', 'then <>')


def test_a_users_own_demo_folder_is_not_the_demo(run: Any, tmp_path: Path) -> None:
    own = tmp_path / 'demo' / 'configs'
    own.mkdir(parents=True)
    (own / 'mine.py').write_text('')
    for config in (own / 'mine.py', 'demo/configs/mine.py'):
        status, output = run(START, config, folder=tmp_path)
        assert status == 0 and 'first <>' in output and 'then <>' in output


def slurm(run: Any, script: Path, folder: Path, **variables: str) -> Any:
    return run(
        script,
        'configs/loveda/efficientnet_lite0_fpn_loveda.py',
        '--resume',
        folder=folder,
        SLURM_PROCID='0',
        SLURM_STEP_ID='1',
        SLURM_JOB_ID='7',
        SLURM_SUBMIT_DIR=str(folder),
        **variables,
    )


WANTED: List[str] = [
    f'<{ROOT}/tools/train.py>',
    '<--launcher> <slurm> <--resume>',
    'configs/loveda/efficientnet_lite0_fpn_loveda.py>',
]


def test_slurm_from_another_folder(run: Any, tmp_path: Path) -> None:
    for folder in (tmp_path, ROOT):
        status, output = slurm(run, ROOT / 'scripts' / 'slurm_train.sh', folder)
        assert status == 0 and all(words in output for words in WANTED), output


def test_slurm_runs_a_copy_of_the_script(run: Any, tmp_path: Path) -> None:
    spool = tmp_path / 'spool' / 'slurm_script'
    spool.parent.mkdir()
    shutil.copy(str(ROOT / 'scripts' / 'slurm_train.sh'), str(spool))
    status, output = slurm(run, spool, tmp_path)
    assert status == 2 and 'Set MAPSAGE_ROOT' in output
    for folder, variables in ((ROOT, {}), (tmp_path, {'MAPSAGE_ROOT': str(ROOT)})):
        status, output = slurm(run, spool, folder, **variables)
        assert status == 0 and all(words in output for words in WANTED), output
    scontrol = tmp_path / 'scontrol'
    scontrol.write_text(f'#!/bin/sh\necho "   Command={ROOT}/scripts/slurm_train.sh x.py"\n')
    scontrol.chmod(0o755)
    status, output = slurm(run, spool, tmp_path)
    assert status == 0 and all(words in output for words in WANTED), output


def test_the_test_on_all_cards(run: Any, tmp_path: Path) -> None:
    script = ROOT / 'scripts' / 'test.sh'
    status, output = run(
        script,
        'configs/loveda/efficientnet_lite0_fpn_loveda.py',
        'a b.pth',
        '--tta',
        folder=tmp_path,
        NPROC_PER_NODE='3',
        WORK_DIR='of a training',
    )
    assert status == 0
    assert '<--nproc_per_node> <3>' in output and 'work-dir' not in output
    assert (
        f'<{ROOT}/tools/test.py> <{ROOT}/configs/loveda/efficientnet_lite0_fpn_loveda.py> '
        '<--launcher> <pytorch> <a b.pth> <--tta>' in output
    )
    assert run(script, 'config.py')[0] == 2


@pytest.mark.parametrize(
    'given',
    [{}, {'MAPSAGE_SECRET': 'of the user ' * 4}, {'MAPSAGE_SECRET_FILE': '/home/me/secret'}],
)
def test_the_tasks_of_slurm_share_a_secret(given: Any, run: Any, tmp_path: Path) -> None:
    srun = tmp_path / 'srun'
    # what a task of the job would see
    srun.write_text(
        '#!/bin/sh\nsh -c \'echo "<$MAPSAGE_SECRET> <$MAPSAGE_SECRET_FILE>"\'\necho "argv $*"\n'
    )
    srun.chmod(0o755)
    seen = set()
    for _ in range(2):
        status, output = run(
            ROOT / 'scripts' / 'slurm_train.sh',
            'a.py',
            SLURM_JOB_ID='7',
            SLURM_SUBMIT_DIR=str(ROOT),
            **given,
        )
        assert status == 0, output
        secret, file = re.search('<(.*)> <(.*)>', output).groups()
        assert file == given.get('MAPSAGE_SECRET_FILE', '')
        if given:
            assert secret == given.get('MAPSAGE_SECRET', '')
        else:
            assert re.match('[0-9a-f]{64}$', secret) and output.count(secret) == 1
        seen.add(secret)
    assert len(seen) == (1 if given else 2)
