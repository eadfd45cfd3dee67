"""Settings of DynamicGRPOTrainer: what it refuses, what it leans on, by what it filters."""

from __future__ import annotations

import asyncio
import functools
import inspect
from pathlib import Path
from typing import Any, Dict, List

import pytest


def make(folder: Path, rewards: Any = None, config: Any = None, **settings: Any) -> Any:
    import trl_grpo
    from dynamic_grpo import DynamicGRPOTrainer
    from trl import GRPOConfig

    options: Dict[str, Any] = dict(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=2,
        beta=0.0,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=4,
        gradient_checkpointing=False,
        save_strategy='no',
        report_to=[],
        disable_tqdm=True,
    )
    options.update(config or {})
    tokenizer = trl_grpo.tiny_tokenizer()
    model = trl_grpo.tiny_model(tokenizer)
    # With a KL term, TRL loads the reference model from where the model came from.
    model.save_pretrained(str(folder / 'model'))
    model.config._name_or_path = str(folder / 'model')
    return DynamicGRPOTrainer(
        model=model,
        reward_funcs=rewards or [trl_grpo.accuracy],
        args=GRPOConfig(**options),
        train_dataset=trl_grpo.prompts(),
        processing_class=tokenizer,
        **settings,
    )


@pytest.mark.parametrize(
    'config, settings, words',
    [
        (dict(loss_type='bnpo'), {}, "loss_type='bnpo'.*Choose one of dapo, grpo, dr_grpo"),
        (dict(loss_type='grpo', beta=0.1), {}, "loss_type='grpo' and beta=0.1: the KL term"),
        (dict(entropy_coef=0.1), {}, 'an entropy bonus'),
        ({}, dict(shortfall='shrink'), "Choose 'mask'"),
        ({}, dict(filter_weights=[1, 0]), '2 filter_weights for 1 reward functions'),
        (dict(multi_objective_aggregation='normalize_then_sum'), {}, "Set 'sum_then_normalize'"),
    ],
)
def test_what_is_not_exact_is_refused(
    config: dict, settings: dict, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        make(tmp_path, config=config, **settings)


@pytest.mark.parametrize(
    'config, settings',
    [(dict(loss_type='dapo', beta=0.1), {}), (dict(loss_type='bnpo'), dict(shortfall='pad'))],
)
def test_what_is_exact_is_not_refused(config: dict, settings: dict, tmp_path: Path) -> None:
    make(tmp_path, config=config, **settings)


def test_the_installed_trl_has_every_method_that_the_example_leans_on() -> None:
    from dynamic_grpo import check_trl

    check_trl()


@pytest.mark.parametrize('name', ['_generate', '_calculate_rewards', '_save_checkpoint'])
def test_a_changed_method_is_named(name: str) -> None:
    from dynamic_grpo import TrlChangedError, check_trl
    from trl import GRPOTrainer

    changed = type('GRPOTrainer', (GRPOTrainer,), {name: lambda self, something_else: None})
    with pytest.raises(TrlChangedError, match=f'GRPOTrainer.{name} takes .*something_else'):
        check_trl(changed)
    gone = type('GRPOTrainer', (), {})
    with pytest.raises(TrlChangedError, match='_generate takes no call: it is gone'):
        check_trl(gone)


def test_a_filter_reward_apart_from_the_shaped_ones(tmp_path: Path) -> None:
    """A group that fails as a whole has a spread in its shaped reward, and does not pass."""
    import trl_grpo

    def brevity(completion_ids: List[List[int]], **kwargs: Any) -> List[float]:
        return [-0.1 * len(ids) + 0.01 * (ids[0] % 7) for ids in completion_ids]

    passed: Dict[bool, List[bool]] = {}
    for apart in (True, False):
        trainer = make(
            tmp_path,
            [trl_grpo.accuracy, brevity],
            shortfall='fallback',
            filter_weights=[1, 0] if apart else None,
        )
        trainer.train()
        rows = trainer._batch.samples
        accuracies = [
            [float(row['rewards'][0]) for row in rows[start : start + 4]]
            for start in range(0, len(rows), 4)
        ]
        assert trainer._batch.statistics.outcome == 'valid'
        passed[apart] = [max(values) > min(values) for values in accuracies]
    assert all(passed[True]) and not all(passed[False])


def test_the_score_of_all_drawn_is_told_beside_the_score_of_the_batch(tmp_path: Path) -> None:
    trainer = make(tmp_path, config=dict(logging_steps=1))
    trainer.train()
    rows = [row for row in trainer.state.log_history if 'dynamic_sampling/pass_rate' in row]
    assert len(rows) == 2
    for row in rows:
        assert row['frac_reward_zero_std'] == 0
        assert row['reward'] >= row['dynamic_sampling/reward_of_all_drawn'] > 0


class Grader:
    """A reward function that is an object."""

    def __init__(self, rewards: List[float]) -> None:
        self.rewards = rewards

    def __call__(self, completions: List[str], **kwargs: Any) -> List[float]:
        if not self.rewards:
            raise OSError('the grader has no disk')
        return self.rewards


class AsyncGrader(Grader):
    """The same, awaited."""

    async def __call__(self, completions: List[str], **kwargs: Any) -> List[float]:
        return super().__call__(completions, **kwargs)


@pytest.mark.parametrize(
    'grader, words',
    [
        (Grader([]), 'no disk'),
        (functools.partial(Grader([]), style='short'), 'no disk'),
        (AsyncGrader([]), 'no disk'),
        (Grader([1.0]), 'Grader returned 1 rewards for 2 completions'),
        (Grader(['good', 'bad']), 'could not convert'),
    ],
)
def test_no_reward_function_raises_before_the_ranks_meet(
    grader: Any, words: str, tmp_path: Path
) -> None:
    """The other ranks would wait in TRL's gather of the rewards."""
    trainer = make(tmp_path, [grader])
    [function] = trainer.reward_funcs
    rewards = function(completions=['w1', 'w2'])
    assert inspect.iscoroutine(rewards) == isinstance(grader, AsyncGrader)
    if isinstance(grader, AsyncGrader):
        rewards = asyncio.run(rewards)
    assert rewards == [None, None]
    assert words in str(trainer._failure)


def test_an_evaluation_ends_with_the_error_of_a_grader(tmp_path: Path) -> None:
    def grade(completions: List[str], **kwargs: Any) -> List[float]:
        raise OSError('the grader has no disk')

    trainer = make(tmp_path, [grade], config=dict(per_device_eval_batch_size=8))
    with pytest.raises(OSError, match='no disk'):
        trainer.evaluate(trainer.train_dataset.select(range(8)))
