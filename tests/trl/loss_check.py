"""Ranks of test_trl_losses.py: the gradient of a step next to one that is written out.

Every setting trains one step of the tiny model at a learning rate of 0. The gradient before the
optimizer is compared with a gradient of the same completions, without padding and without TRL.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any, Dict, List

import torch
import torch.distributed as dist
from dynamic_grpo import DynamicGRPOTrainer
from transformers import TrainerCallback
from trl import GRPOConfig
from trl_grpo import prompts, tiny_model, tiny_tokenizer

POLICIES = ('mask', 'pad', 'fallback')
LOSSES = ('dapo', 'grpo', 'dr_grpo')
# Long enough that completions end at different lengths.
MAX_LENGTH = 8


class Gradients(TrainerCallback):
    """Keeps the gradients that the optimizer would use."""

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.values = {
            name.replace('module.', ''): parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }


def uneven(
    completions: List[str], completion_ids: List[List[int]], answer: List[str], **kwargs: Any
) -> List[float]:
    """Rewards with a spread for one prompt out of three; they are all 0 for the others."""
    return [
        float(sum(ids) % 5) / 5 if answer[index] in ('w0', 'w3', 'w6', 'w9') else 0.0
        for index, ids in enumerate(completion_ids)
    ]


def written_out(rows: List[Dict[str, Any]], loss_type: str, group: int) -> torch.Tensor:
    """Return the loss of unpadded completions of all ranks, live ones only."""
    rewards = torch.stack([row['rewards'] for row in rows]).sum(1).view(-1, group)
    spread = rewards.std(1, keepdim=True)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (spread + 1e-4)).flatten()
    sums, lengths = [], []
    for row, advantage in zip(rows, advantages):
        ids = torch.tensor([row['prompt_ids'] + row['completion_ids']])
        log_probabilities = MODEL(ids).logits[0].log_softmax(-1)
        start, count = len(row['prompt_ids']), len(row['completion_ids'])
        tokens = log_probabilities[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
        sums.append(-advantage * tokens.sum())
        lengths.append(count)
    if loss_type == 'dapo':
        return sum(sums) / sum(lengths)
    if loss_type == 'grpo':
        return sum(total / count for total, count in zip(sums, lengths)) / len(rows)
    return sum(sums) / (len(rows) * MAX_LENGTH)


def check(policy: str, loss_type: str, folder: Path) -> Dict[str, Any]:
    """Return the largest difference of the gradients, the largest gradient, and the outcome."""
    tokenizer = tiny_tokenizer()
    gradients = Gradients()
    config = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=1,
        learning_rate=0.0,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        num_generations=4,
        beta=0.0,
        max_completion_length=MAX_LENGTH,
        loss_type=loss_type,
        max_grad_norm=0.0,
        gradient_checkpointing=False,
        save_strategy='no',
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    trainer = DynamicGRPOTrainer(
        model=tiny_model(tokenizer),
        reward_funcs=[uneven],
        args=config,
        train_dataset=prompts(),
        processing_class=tokenizer,
        max_resample_times=0,
        shortfall=policy,
        callbacks=[gradients],
    )
    trainer.train()
    batch = trainer._batch
    local = [
        dict(
            prompt_ids=row['prompt_ids'],
            completion_ids=row['completion_ids'],
            rewards=row['rewards'],
        )
        for row, weight in zip(batch.samples, batch.weights)
        if weight
    ]
    gathered: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    rows = [row for part in gathered for row in part]
    global MODEL
    MODEL = tiny_model(tokenizer).train()
    written_out(rows, loss_type, 4).backward()
    expected = {
        name: parameter.grad
        for name, parameter in MODEL.named_parameters()
        if parameter.grad is not None
    }
    assert set(expected) == set(gradients.values)
    return dict(
        policy=policy,
        loss_type=loss_type,
        outcome=batch.statistics.outcome,
        live=len(rows),
        difference=max(
            float((expected[name] - value).abs().max()) for name, value in gradients.values.items()
        ),
        largest=max(float(value.abs().max()) for value in expected.values()),
    )


if __name__ == '__main__':
    output = Path(sys.argv[1])
    results = [
        check(policy, loss_type, output)
        for policy, loss_type in itertools.product(POLICIES, LOSSES)
    ]
    if not dist.get_rank():
        (output / 'results.json').write_text(json.dumps(results))
