"""The examples of docs/explanation/extending.md run: two commands, hooks, accelerators and extras."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Tuple

import numpy as np
import pytest
import torch
from PIL import Image
from support import ROOT, main_leg, write_tiny_config, write_tiny_data

pytestmark = main_leg

PAGE = ROOT / 'docs' / 'explanation' / 'extending.md'
_BLOCK = re.compile(
    r'(?:^<!-- test: (?P<order>\w+) (?P<path>\S+)(?: (?P<line>[^\n]*?))? -->\n)?'
    r'^```(?P<language>\w+)\n(?P<code>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)
# A screen.
_LINES = 45


def sections() -> Dict[str, List[re.Match]]:
    """Return the blocks of each section of the page."""
    parts = re.split(r'^##+ (.+)$', PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {title: list(_BLOCK.finditer(text)) for title, text in zip(parts[::2], parts[1::2])}


@pytest.fixture(scope='module')
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages with the files of the page, and what its commands read."""
    folder = tmp_path_factory.mktemp('checkout')
    for name in ('mapsage', 'mapsage_launcher', 'tools'):
        shutil.copytree(
            ROOT / name,
            folder / name,
            ignore=shutil.ignore_patterns('__pycache__', 'node_modules', 'benchmarks'),
        )
    write_tiny_config(folder / 'my_config.py', write_tiny_data(folder / 'data'))
    (folder / 'labels').mkdir()
    Image.fromarray(np.array([[0, 0, 1, 255]], 'uint8')).save(folder / 'labels' / 'a.png')
    Image.fromarray(np.full((4, 4, 3), (1, 2, 0), 'uint8')).save(folder / 'image.png')
    for block in (block for blocks in sections().values() for block in blocks):
        if block['order'] is None:
            continue
        path = folder / block['path']
        before = path.read_text() if path.exists() else ''
        if block['order'] == 'before':
            assert before.count(block['line']) == 1
            path.write_text(before.replace(block['line'], block['code'] + block['line']))
        else:
            assert (block['order'] == 'append') == bool(before), path
            path.parent.mkdir(exist_ok=True)
            path.write_text(before + block['code'])
    for name in ('rehearsal', 'one_thread', 'greenness', 'disk_reserve'):
        (folder / 'mapsage' / 'extras' / name / '__init__.py').touch()
    programs = folder / 'bin'
    programs.mkdir()
    for name, words in (
        ('python', ''),
        ('mapsage', '-c "from mapsage_launcher.command import main; main()" '),
    ):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
        (programs / name).chmod(0o755)
    return folder


def run(checkout: Path, title: str, status: int = 0, **changes: str) -> Tuple[str, str]:
    """Run the shell block of a section, and return what it prints: stdout, and all of it.

    Args:
        checkout: Folder with the files of the page.
        title: Title of the section.
        status: Exit status that is expected.
        changes: Text of the block -> text that is run in its place.
    """
    (block,) = [block for block in sections()[title] if block['language'] == 'bash']
    code = block['code'].replace('PYTHONPATH=.', f'PYTHONPATH={checkout}')
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    done = subprocess.run(
        ['bash', '-ec', code],
        cwd=str(checkout),
        env={
            **os.environ,
            'PATH': f'{checkout / "bin"}:{os.environ["PATH"]}',
            'PYTHONPATH': str(checkout),
            'OMP_NUM_THREADS': '1',
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        timeout=300,
    )
    assert done.returncode == status, done.stderr[-3000:]
    return done.stdout, done.stdout + done.stderr


def test_a_command(checkout: Path) -> None:
    printed, _ = run(checkout, 'A command')
    assert printed.startswith('usage: mapsage label_shares [-h] [--ignore IGNORE] labels')
    assert printed.endswith('   0  66.67%\n   1  33.33%\n   1  50.00%\n 255  50.00%\n')


@pytest.mark.long
def test_a_command_that_reads_a_config(checkout: Path) -> None:
    printed, _ = run(checkout, 'A command that reads a config')
    sizes = {
        line.split()[0]: int(line.split()[1].replace(',', '')) for line in printed.splitlines()
    }
    assert sizes['data_preprocessor'] == 0
    assert 0 < sizes['decode_head'] < sizes['backbone'] < 10_000


@pytest.mark.long
def test_a_hook(checkout: Path) -> None:
    assert re.search(r'slowest step: \d+ ms', run(checkout, 'A hook')[1])


@pytest.mark.long
def test_a_hook_that_knows_how_a_run_ended(checkout: Path) -> None:
    title = 'A hook that knows how a run ended'
    run(checkout, title)
    result = checkout / 'work_dirs' / 'ended' / 'result.json'
    assert json.loads(result.read_text()) == dict(step=10, error=None)
    run(checkout, title, 1, cpu='cpu --cfg-options optim_wrapper.optimizer.lr=1e30')
    assert 'iteration' in json.loads(result.read_text())['error']


@pytest.mark.long
def test_an_accelerator(checkout: Path) -> None:
    _, output = run(checkout, 'An accelerator')
    assert 'accelerator rehearsal (1 simulated device(s), gradients over gloo)' in output
    assert (checkout / 'work_dirs' / 'rehearsed' / 'last_checkpoint').is_file()


@pytest.mark.long
def test_an_accelerator_that_changes_another(checkout: Path) -> None:
    _, output = run(checkout, 'An accelerator that changes another')
    assert 'accelerator cpu1 (1 device(s), gradients over gloo)' in output
    saved = torch.load(checkout / 'work_dirs' / 'one_thread' / 'iter_10.pth', weights_only=False)
    assert saved['meta']['reproducibility'][0]['facts']['threads'] == '1'


@pytest.mark.long
def test_an_extra(checkout: Path) -> None:
    assert run(checkout, 'An extra')[0] == '100.0%\n'
    program = (
        'import mapsage\nfrom mmengine.registry import TRANSFORMS\nimport numpy as np\n'
        'image = np.array([[[0, 5, 0], [5, 0, 0]]])\n'
        'note = TRANSFORMS.build(dict(type="NoteGreenness"))\n'
        'assert note(dict(img=image))["greenness"] == 0.5\n'
        'import sys; assert mapsage.__file__.startswith(sys.argv[1])\n'
    )
    subprocess.run([sys.executable, '-c', program, str(checkout)], cwd=str(checkout), check=True)


@pytest.mark.long
def test_an_extra_that_acts_while_a_run_is_built(checkout: Path) -> None:
    title = 'An extra that acts while a run is built'
    run(checkout, title)
    _, output = run(checkout, title, 1, **{'0.001': '1e9'})
    assert 'disk_reserve=1000000000.0: ' in output and 'GiB free. Free some, or lower' in output


def test_an_example_fits_on_one_screen() -> None:
    lengths = {
        block['path']: block['code'].count('\n')
        for blocks in sections().values()
        for block in blocks
        if block['order']
    }
    assert len(lengths) == 16 and max(lengths.values()) <= _LINES, lengths
