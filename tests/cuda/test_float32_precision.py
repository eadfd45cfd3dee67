"""``env_cfg.float32_matmul_precision`` and ``cudnn_allow_tf32`` in every process that computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Tuple

import pytest
import torch
from ranks import run_ranks
from toy_runs import log_of, toy_runner

from mapsage.engine.guards.reproducibility import facts_of_process


def settings_of_run(folder: Path, accelerator: str, changes: Dict[str, Any]) -> Any:
    """Return what PyTorch computes with in a run, the facts of its checkpoint, and its log."""
    runner, _ = toy_runner(folder, **{'env_cfg.accelerator': accelerator, **changes})
    facts = facts_of_process(runner.accelerator, 0, 'native')
    settings = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    return settings, facts, log_of(runner)


@pytest.mark.parametrize(
    'changes, expected',
    [
        ({}, ('highest', True)),
        ({'env_cfg.float32_matmul_precision': 'high'}, ('high', True)),
        (
            {'env_cfg.float32_matmul_precision': 'medium', 'env_cfg.cudnn_allow_tf32': False},
            ('medium', False),
        ),
    ],
)
def test_a_run_on_a_card(
    changes: Dict[str, Any], expected: Tuple[str, bool], tmp_path: Path
) -> None:
    [(settings, facts, log)] = run_ranks(
        settings_of_run, 1, tmp_path / 'rank', tmp_path / 'run', 'cuda', changes
    )
    assert settings == expected
    assert facts['matmul_allow_tf32'] == str(expected[0] != 'highest')
    assert facts['cudnn_allow_tf32'] == str(expected[1])
    assert 'no effect' not in log


def test_a_run_on_the_cpu_says_that_they_have_no_effect(tmp_path: Path) -> None:
    changes = {'env_cfg.float32_matmul_precision': 'medium', 'env_cfg.cudnn_allow_tf32': False}
    [(settings, _, log)] = run_ranks(
        settings_of_run, 1, tmp_path / 'rank', tmp_path / 'run', 'cpu', changes
    )
    assert settings == ('highest', True)
    assert (
        "env_cfg.float32_matmul_precision='medium' and env_cfg.cudnn_allow_tf32=False: no "
        'effect on cpu'
    ) in log
