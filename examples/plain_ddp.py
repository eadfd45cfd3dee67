"""Dynamic sampling in plain PyTorch: a policy gradient on groups of answers whose rewards differ.

    torchrun --nproc_per_node 2 examples/plain_ddp.py
    torchrun --nproc_per_node 2 examples/plain_ddp.py --steps 60 --resume   # continue to step 60

It needs torch and NumPy. The policy answers questions from a table; each answer is one of eight
words, and one word is right. Two processes of a CPU take a few seconds for the 40 steps.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, Dict, List, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mapsage.sampling import DynamicSampler, SampledBatch, Validity

QUESTIONS, WORDS = 48, 8
# Answers to one question, and answers that a rank trains on in a step.
GROUP, TARGET = 4, 32

Answer = Dict[str, int]


class Policy(nn.Module):
    """A table of logits, one row for each question."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Embedding(QUESTIONS, WORDS)
        nn.init.zeros_(self.logits.weight)

    def forward(self, questions: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities of shape ``(N, WORDS)`` for questions of shape ``(N,)``."""
        return self.logits(questions).log_softmax(1)


def right_word(question: int) -> int:
    """Return the word that answers a question."""
    return question * 5 % WORDS


def reward(answers: Sequence[Answer]) -> List[float]:
    """Return 1 for each right answer and 0 for each wrong one."""
    return [float(answer['word'] == right_word(answer['question'])) for answer in answers]


class Rollout:
    """Draws questions, and answers from the policy in training.

    Args:
        policy: The policy.
        rank: Rank of this process, so that every rank draws other questions.

    Attributes:
        generator: Generator of all that is random.
        generated: Number of answers so far.
    """

    def __init__(self, policy: Policy, rank: int) -> None:
        self._policy = policy
        self.generator = torch.Generator().manual_seed(1000 + rank)
        self.generated = 0

    def __call__(self, wanted: int) -> List[Answer]:
        """Return ``wanted`` answers, in whole groups: what the sampler calls to fetch samples."""
        questions = torch.randint(QUESTIONS, (wanted // GROUP,), generator=self.generator)
        questions = questions.repeat_interleave(GROUP)
        self.generated += len(questions)
        if not len(questions):
            return []
        with torch.no_grad():
            chances = self._policy(questions).exp()
        words = torch.multinomial(chances, 1, generator=self.generator)[:, 0]
        return [
            dict(question=question, word=word)
            for question, word in zip(questions.tolist(), words.tolist())
        ]


def policy_loss(log_probabilities: torch.Tensor, batch: SampledBatch) -> torch.Tensor:
    """Return the policy gradient's loss: the mean over answers of -advantage * log-probability.

    The weights are 1, unless the sampler masks what is missing: then repeats weigh 0.

    Args:
        log_probabilities: Output of the policy for the answers of the batch, ``(N, WORDS)``.
        batch: Whole groups of answers.
    """
    words = torch.tensor([answer['word'] for answer in batch.samples])
    rewards = torch.tensor(reward(batch.samples)).view(-1, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    losses = -advantages * log_probabilities.gather(1, words[:, None])[:, 0]
    return (losses * torch.tensor(batch.weights)).mean() * batch.loss_weight


def expected_reward(policy: Policy) -> float:
    """Return the exact mean reward of the policy over all questions."""
    questions = torch.arange(QUESTIONS)
    right = torch.tensor([right_word(question) for question in range(QUESTIONS)])
    with torch.no_grad():
        return float(policy(questions).exp()[questions, right].mean())


def save(
    folder: Path, rank: int, shared: Dict[str, Any], sampler: DynamicSampler, rollout: Rollout
) -> None:
    """Save a checkpoint: what all ranks share once, and the state of every rank. Collective."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(
        dict(
            sampler=sampler.state_dict(),
            generated=rollout.generated,
            generator=rollout.generator.get_state(),
        ),
        folder / f'rank_{rank}.pt',
    )
    if not rank:
        torch.save(shared, folder / 'shared.pt')
    # Only a complete checkpoint becomes the latest one.
    dist.barrier()
    if not rank:
        latest = folder.parent / 'latest.tmp'
        latest.write_text(folder.name)
        os.replace(str(latest), str(folder.parent / 'latest'))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--steps', type=int, default=40)
    parser.add_argument('--shortfall', default='mask')
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/plain_ddp'))
    parser.add_argument('--save-every', type=int, default=10)
    parser.add_argument('--resume', action='store_true')
    args = parser.parse_args()

    dist.init_process_group('gloo')
    rank = dist.get_rank()
    policy = Policy()
    model = DistributedDataParallel(policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    rollout = Rollout(policy, rank)
    sampler = DynamicSampler(
        fetch=rollout,
        score=reward,
        validity=Validity(eps=1e-6),
        group_size=GROUP,
        local_target=TARGET,
        shortfall=args.shortfall,
    )
    start = 0
    if args.resume:
        folder = args.work_dir / (args.work_dir / 'latest').read_text()
        shared = torch.load(folder / 'shared.pt')
        policy.load_state_dict(shared['policy'])
        optimizer.load_state_dict(shared['optimizer'])
        start = shared['step']
        local = torch.load(folder / f'rank_{rank}.pt')
        sampler.load_state_dict(local['sampler'])
        rollout.generator.set_state(local['generator'])
        rollout.generated = local['generated']

    for step in range(start + 1, args.steps + 1):
        batch = sampler.sample()
        questions = torch.tensor([answer['question'] for answer in batch.samples])
        loss = policy_loss(model(questions), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.save_every == 0 or step == args.steps:
            save(
                args.work_dir / f'step_{step}',
                rank,
                dict(step=step, policy=policy.state_dict(), optimizer=optimizer.state_dict()),
                sampler,
                rollout,
            )
            if not rank:
                print(
                    f'step {step}: loss {loss.item():.4f}, pass rate '
                    f'{batch.statistics.pass_rate:.2f}, expected reward '
                    f'{expected_reward(policy):.3f}',
                    flush=True,
                )
    if not rank:
        trained, generated = args.steps * TARGET, rollout.generated
        print(f'done: {generated} answers generated on rank 0 for {trained} trained on')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
