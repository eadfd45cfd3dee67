"""Masks fade out over a run, also of virtual ranks and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from mask_runs import run_of, weights_of

from mapsage.extras.mask_transformers.annealing_hook import (
    AnnealingError,
    MaskAnnealingHook,
    check_phases,
    equal_phases,
    mask_probability,
)

pytestmark = pytest.mark.usefixtures('own_environment')


@pytest.mark.parametrize('kind', ['eomt', 'pmt'])
def test_each_step_has_its_probabilities(kind: str, tiny_data: Path, tmp_path: Path) -> None:
    """Two blocks and eight steps: phases of two; the last checkpoint is without masks."""
    runner, recorder = run_of(kind, tiny_data, tmp_path / 'run', steps=8)
    model = runner.train()
    half = 0.5**0.9
    assert [each[0] for each in recorder.masked] == pytest.approx([1, 1, 1, half, 0, 0, 0, 0])
    assert [each[1] for each in recorder.masked] == pytest.approx([1, 1, 1, 1, 1, half, 0, 0])
    saved = torch.load(
        str(tmp_path / 'run' / 'iter_4.pth'),
        map_location='cpu',
        **({'weights_only': False} if torch.__version__ >= '2' else {}),
    )
    assert saved['state_dict']['decode_head.attn_mask_probs'].tolist() == [0, 1]
    assert model.decode_head.attn_mask_probs.tolist() == [0, 0]


def test_virtual_ranks_all_have_them(tiny_data: Path, tmp_path: Path) -> None:
    """Each of three virtual ranks has buffers of its own, and the same probabilities."""
    runner, recorder = run_of('eomt', tiny_data, tmp_path / 'run', **{'env_cfg.virtual_ranks': 3})
    runner.train()
    assert len(recorder.masked) == 3 * 6
    for step in range(6):
        each = recorder.masked[3 * step : 3 * step + 3]
        assert each[0] == each[1] == each[2]
    assert recorder.masked[0] == [1, 1] and recorder.masked[-1] == [0, 0]


@pytest.mark.parametrize('kind', ['eomt', 'pmt'])
def test_a_resumed_run_has_the_bits_of_a_whole_one(
    kind: str, tiny_data: Path, tmp_path: Path
) -> None:
    whole, recorder = run_of(kind, tiny_data, tmp_path / 'whole')
    expected = weights_of(whole.train())
    again, second = run_of(
        kind,
        tiny_data,
        tmp_path / 'again',
        resume=True,
        load_from=str(tmp_path / 'whole' / 'iter_3.pth'),
    )
    found = weights_of(again.train())
    assert second.losses == recorder.losses[3:] and second.masked == recorder.masked[3:]
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    'hook, message',
    [
        (dict(starts=[0, 1, 2], ends=[3, 4, 5]), '3 starts and ends, and the model has 2 masked'),
        (dict(starts=[3], ends=[1]), 'each start of 0 or more before its end'),
    ],
)
def test_phases_of_another_model(hook: Any, message: str, tiny_data: Path, tmp_path: Path) -> None:
    runner, _ = run_of('eomt', tiny_data, tmp_path / 'run')
    with pytest.raises(AnnealingError, match=message):
        MaskAnnealingHook(**hook).before_train(runner)


def test_a_model_without_masks(tmp_path: Path) -> None:
    runner = tiny_run.build_runner(str(tmp_path), [MaskAnnealingHook()])
    with pytest.raises(AnnealingError, match='take it out of custom_hooks'):
        runner.train()


@pytest.mark.parametrize('first, update_buffers', [(0, False), (1, True)])
def test_an_average_has_the_masks_of_the_step(
    first: int, update_buffers: bool, tiny_data: Path, tmp_path: Path
) -> None:
    """It is what a checkpoint gives to a map: masks that are gone must not come back with it."""
    hooks = [
        dict(type='EMAHook', momentum=0.1, update_buffers=update_buffers),
        dict(type='MaskAnnealingHook'),
    ]
    runner, _ = run_of(
        'eomt', tiny_data, tmp_path / 'run', steps=8, custom_hooks=hooks[::-1] if first else hooks
    )
    model = runner.train()
    for step, masked in ((4, [0, 1]), (8, [0, 0])):
        saved = torch.load(
            str(tmp_path / 'run' / f'iter_{step}.pth'),
            map_location='cpu',
            **({'weights_only': False} if torch.__version__ >= '2' else {}),
        )
        averaged, trained = saved['state_dict'], saved['ema_state_dict']
        assert averaged['decode_head.attn_mask_probs'].tolist() == masked
        assert trained['module.decode_head.attn_mask_probs'].tolist() == masked
    name = 'decode_head.queries.weight'
    assert torch.equal(trained[f'module.{name}'], model.decode_head.queries.weight)
    assert not torch.equal(averaged[name], trained[f'module.{name}'])


def test_probabilities_fall_between_start_and_end() -> None:
    values = [mask_probability(step, 10, 30) for step in (0, 9, 10, 20, 29, 30, 99)]
    assert values[:3] == [1, 1, 1] and values[5:] == [0, 0]
    assert values[3] == pytest.approx(0.5**0.9) and values[4] == pytest.approx(0.05**0.9)


def test_equal_phases_are_the_published_ones() -> None:
    """Of DINOv2 on ADE20K, 39,120 steps: 6,520 times 1 to 4 and 2 to 5."""
    starts, ends = equal_phases(4, 39120)
    assert starts == [6520, 13040, 19560, 26080] and ends == [13040, 19560, 26080, 32600]


@pytest.mark.parametrize('phases', [([1], None), ([1, 2], [3]), ([5], [5]), ([-1], [4]), ([], [])])
def test_phases_that_are_none(phases: Any) -> None:
    with pytest.raises(AnnealingError, match='expected one start and one end'):
        check_phases(*phases)
