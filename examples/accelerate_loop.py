"""Dynamic sampling in a loop with accelerate, with checkpoints that hold the pool of every rank.

    torchrun --nproc_per_node 2 examples/accelerate_loop.py

The policy, its answers and the loss are those of ``plain_ddp.py``. Tried with accelerate 1.15.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from plain_ddp import GROUP, TARGET, Policy, Rollout, expected_reward, policy_loss, reward

from mapsage.sampling import DynamicSampler, Validity


def save(accelerator: Accelerator, folder: Path, sampler: DynamicSampler, rollout: Rollout) -> None:
    """Save a checkpoint. Collective.

    ``register_for_checkpointing`` is not for a sampler: it saves the state of rank 0 and loads it
    on every rank, which the sampler refuses. So every rank writes a file.
    """
    accelerator.save_state(str(folder))
    torch.save(
        dict(
            sampler=sampler.state_dict(),
            generated=rollout.generated,
            generator=rollout.generator.get_state(),
        ),
        folder / f'sampler_{accelerator.process_index}.pt',
    )
    accelerator.wait_for_everyone()


def load(accelerator: Accelerator, folder: Path, sampler: DynamicSampler, rollout: Rollout) -> None:
    """Continue from a checkpoint of :func:`save`."""
    accelerator.load_state(str(folder))
    local = torch.load(folder / f'sampler_{accelerator.process_index}.pt', weights_only=True)
    sampler.load_state_dict(local['sampler'])
    rollout.generator.set_state(local['generator'])
    rollout.generated = local['generated']


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--steps', type=int, default=40)
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/accelerate_loop'))
    parser.add_argument('--resume-from', type=int, default=0, help='step to continue from')
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    policy = Policy()
    rollout = Rollout(policy, accelerator.process_index)
    model, optimizer = accelerator.prepare(policy, torch.optim.Adam(policy.parameters(), lr=0.1))
    sampler = DynamicSampler(
        fetch=rollout,
        score=reward,
        validity=Validity(eps=1e-6),
        group_size=GROUP,
        local_target=TARGET,
        shortfall='mask',
    )
    if args.resume_from:
        load(accelerator, args.work_dir / f'step_{args.resume_from}', sampler, rollout)

    for step in range(args.resume_from + 1, args.steps + 1):
        batch = sampler.sample()
        questions = torch.tensor([answer['question'] for answer in batch.samples])
        loss = policy_loss(model(questions), batch)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if step % 20 == 0:
            save(accelerator, args.work_dir / f'step_{step}', sampler, rollout)
            accelerator.print(
                f'step {step}: pass rate {batch.statistics.pass_rate:.2f}, expected '
                f'reward {expected_reward(policy):.3f}'
            )
    accelerator.end_training()


if __name__ == '__main__':
    main()
