"""`mapsage operators CONFIG --compare` on simulated cards: its report and its exit status."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support import ROOT, no_simulated_cards

from mapsage.accelerator import AcceleratorError
from mapsage.extras.forensics import list_operators
from mapsage.extras.forensics.operators.dispatch import OperatorError

sys.path.append(str(ROOT / 'tools' / 'benchmarks'))
pytestmark = pytest.mark.usefixtures('own_environment')
with_cards = pytest.mark.skipif(no_simulated_cards() is not None, reason='no simulated cards here')


def compare(config: Path, accelerator: str = 'sim') -> int:
    return list_operators.main(
        [str(config), '--compare', '--accelerator', accelerator, '--crop-size', '32']
    )


@with_cards
def test_a_card_with_right_kernels(tiny_config: Path, capsys: pytest.CaptureFixture) -> None:
    assert compare(tiny_config) == 0
    report = capsys.readouterr().out
    assert '2 images of 32 x 32' in report and '  wrong' not in report
    assert 'operators are right within their bounds' in report.splitlines()[-1]


@with_cards
def test_a_wrong_kernel_is_the_result(tiny_config: Path, capsys: pytest.CaptureFixture) -> None:
    from _planted_kernels import off_by_one, planted

    with planted('convolution_backward', off_by_one):
        assert compare(tiny_config) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == 'result: 1 operator(s) of this card are wrong: convolution_backward'
    assert lines[2].startswith('  convolution_backward') and lines[2].endswith('wrong')
    assert 'differ by more than rounding' in lines[-2]


@with_cards
def test_a_kernel_that_is_wrong_only_in_the_step(
    tiny_config: Path, capsys: pytest.CaptureFixture
) -> None:
    from _planted_kernels import stray_write

    with stray_write('convolution'):
        assert compare(tiny_config) == 1
    report = capsys.readouterr().out
    assert 'every operator compared by itself is right, and the whole step is wrong' in report
    assert ', convolution' in report.splitlines()[-1]


def test_there_must_be_a_card(tiny_config: Path) -> None:
    with pytest.raises((AcceleratorError, OperatorError), match="is 'cpu'.*--accelerator|torch>=2"):
        compare(tiny_config, 'cpu')
