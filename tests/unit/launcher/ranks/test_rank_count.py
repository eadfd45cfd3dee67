"""The launcher starts a rank for each card where nobody says how many."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import List, Optional, Tuple

import pytest
from support import ROOT

from mapsage_launcher.ranks import rank_count

LAUNCH = ['--nnodes', '1', '--nproc_per_node', 'cards', '/x/tools/train.py', 'a.py', '--amp']


def counted(program: Path, arguments: List[str], driver: Optional[str]) -> Tuple[str, str]:
    args = argparse.Namespace(nproc_per_node=arguments[arguments.index('--nproc_per_node') + 1])
    line = rank_count.RankCount(arguments, program, driver).apply(args)
    return args.nproc_per_node, line


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that prints as many cards as CARDS says, behind a line of a library."""
    path = tmp_path / 'count.py'
    path.write_text(
        'import json, os, sys\nprint("a library says this")\n'
        'json.dump(sys.argv[1:], open(os.environ["ARGUMENTS"], "w"))\n'
        'print(json.dumps(dict(accelerator="cuda", cards=int(os.environ["CARDS"]))))\n'
    )
    return path


@pytest.mark.parametrize(
    'cards, ranks, line',
    [
        ('4', '4', '4 ranks, one for each cuda device that is visible'),
        ('1', '1', '1 rank, for the only cuda device that is visible'),
        ('0', '8', '8 ranks, since no card is used'),
    ],
)
def test_a_rank_for_each_card(
    cards: str,
    ranks: str,
    line: str,
    program: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv('CARDS', cards)
    monkeypatch.setenv('ARGUMENTS', str(tmp_path / 'arguments'))
    assert counted(program, LAUNCH, 'cuda')[0] == ranks
    assert counted(program, LAUNCH, 'cuda')[1].startswith(line)
    assert (tmp_path / 'arguments').read_text() == '["a.py", "--amp"]'


def test_nothing_is_counted_without_a_driver_or_where_the_number_is_given(tmp_path: Path) -> None:
    absent = tmp_path / 'absent.py'
    assert counted(absent, LAUNCH, None) == (
        '8',
        '8 ranks, since no card is used (NPROC_PER_NODE sets another number)',
    )
    given = ['--nproc_per_node', '3', '/x/tools/train.py', 'a.py']
    assert counted(absent, given, 'cuda') == ('3', '')


def test_cards_that_cannot_be_counted_are_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    failing = tmp_path / 'failing.py'
    failing.write_text('import sys\nsys.exit("the driver is broken")\n')
    with pytest.raises(rank_count.RankCountError, match='the reason is above'):
        counted(failing, LAUNCH, 'cuda')
    assert 'the driver is broken' in capfd.readouterr().err


def test_an_answer_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    for text in ('', 'usage: ...', '{"cards"'):
        talking = tmp_path / 'talking.py'
        talking.write_text(f'print({text!r})\n')
        with pytest.raises(rank_count.RankCountError, match='expected a line of JSON'):
            counted(talking, LAUNCH, 'cuda')


def test_a_question_for_help_is_left_to_the_program(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('CARDS', '2')
    monkeypatch.setenv('ARGUMENTS', str(tmp_path / 'arguments'))
    assert counted(program, [*LAUNCH, '--help', '-h'], 'cuda')[0] == '2'
    assert (tmp_path / 'arguments').read_text() == '["a.py", "--amp"]'


@pytest.mark.long
def test_the_program_counts_what_a_run_would_use(tmp_path: Path) -> None:
    config = tmp_path / 'config.py'
    config.write_text("env_cfg = dict(accelerator='cpu')\n")
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / 'tools' / 'count_cards.py'),
            str(config),
            '--work-dir',
            'x',
            '--unknown-option',
            '3',
        ],
        stdout=subprocess.PIPE,
        universal_newlines=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == '{"accelerator": "cpu", "cards": 0}'
