"""The gradient of DynamicGRPOTrainer is the one of its valid completions, written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

import pytest
from trl_ranks import run_ranks


@pytest.fixture(scope='module')
def results(tmp_path_factory: pytest.TempPathFactory) -> Dict[Any, Dict[str, Any]]:
    folder = tmp_path_factory.mktemp('losses')
    run = run_ranks(Path(__file__).with_name('loss_check.py'), folder)
    assert run.statuses == [0, 0], '\n'.join(run.outputs)[-4000:]
    return {
        (row['policy'], row['loss_type']): row
        for row in json.loads((folder / 'results.json').read_text())
    }


@pytest.mark.parametrize('loss_type', ['dapo', 'grpo', 'dr_grpo'])
@pytest.mark.parametrize('policy', ['mask', 'pad', 'fallback'])
def test_the_gradient_equals_a_written_out_one(
    policy: str, loss_type: str, results: Dict[Any, Dict[str, Any]]
) -> None:
    result = results[policy, loss_type]
    assert result['outcome'] == policy
    assert result['live'] == (8 if policy == 'mask' else 24)
    assert result['largest'] > 0.05
    assert result['difference'] < 1e-6


def test_the_losses_differ_from_each_other(results: Dict[Any, Dict[str, Any]]) -> None:
    """Completions of one length would not tell a mean over tokens from one over completions."""
    assert len({results['mask', loss]['largest'] for loss in ('dapo', 'grpo', 'dr_grpo')}) == 3
