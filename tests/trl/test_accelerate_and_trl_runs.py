"""The examples run at two ranks, are resumed to the same bits, and end together."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from trl_ranks import command_of_page, run_command, run_ranks


def test_a_loop_with_accelerate_resumes_to_the_same_bits(tmp_path: Path) -> None:
    command = command_of_page('sampling-any-loop.md', 'accelerate_loop.py')
    whole = run_command(command, '--work-dir', tmp_path / 'run')
    assert 'step 40: pass rate' in whole
    reward = float(re.findall(r'expected reward ([0-9.]+)', whole)[-1])
    assert reward > 0.5  # 0.125 by chance
    first = (tmp_path / 'run' / 'step_40' / 'model.safetensors').read_bytes()
    samplers = [
        torch.load(tmp_path / 'run' / 'step_40' / f'sampler_{rank}.pt') for rank in range(2)
    ]
    shutil.rmtree(tmp_path / 'run' / 'step_40')
    rest = run_command(command, '--work-dir', tmp_path / 'run', '--resume-from', 20)
    assert 'step 20' not in rest
    assert (tmp_path / 'run' / 'step_40' / 'model.safetensors').read_bytes() == first
    for rank, sampler in enumerate(samplers):
        again = torch.load(tmp_path / 'run' / 'step_40' / f'sampler_{rank}.pt')
        assert again['sampler'] == sampler['sampler']
        assert again['generated'] == sampler['generated']


def test_a_trl_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    command = command_of_page('trl.md', 'trl_grpo.py')
    output = run_command(command, '--output-dir', tmp_path / 'run')
    steps = re.findall(r'generated (\d+), of the final batch without a spread ([0-9.]+)', output)
    assert len(steps) == 6 and max(int(generated) for generated, _ in steps) > 16
    assert {float(share) for _, share in steps} == {0.0}
    last = tmp_path / 'run' / 'checkpoint-6'
    first = (last / 'model.safetensors').read_bytes()
    state = [torch.load(last / f'dynamic_sampling_{rank}.pt') for rank in range(2)]
    assert state[0]['sampler']['ranks'] == [0, 1, 2] and state[1]['sampler']['ranks'] == [1, 2, 2]
    shutil.rmtree(last)
    run_command(command, '--output-dir', tmp_path / 'run', '--resume')
    assert (last / 'model.safetensors').read_bytes() == first
    assert [torch.load(last / f'dynamic_sampling_{rank}.pt') for rank in range(2)] == state


def test_a_grader_that_raises_on_one_rank_ends_all_ranks_with_its_text(tmp_path: Path) -> None:
    program = tmp_path / 'broken.py'
    program.write_text("""
import os
import trl_grpo

calls = iter(range(100))
grade = trl_grpo.accuracy


class Grader:
    def __call__(self, completions, answer, **kwargs):
        if os.environ['RANK'] == '1' and next(calls) == 2:
            raise OSError('the grader of rank 1 has no disk')
        return grade(completions, answer)


trl_grpo.accuracy = Grader()
trl_grpo.main()
""")
    run = run_ranks(program, '--output-dir', tmp_path / 'run', timeout=120)
    assert all(run.statuses)
    assert 'OSError: the grader of rank 1 has no disk' in run.outputs[1].split('\n')[-2]
    assert (
        'rank 1 failed in fetching or scoring samples: OSError: the grader of rank 1 has no disk'
    ) in run.outputs[0]


@pytest.mark.long
def test_plain_ddp_resumes_to_the_same_bits_with_the_remedies_of_the_page(tmp_path: Path) -> None:
    program = tmp_path / 'loop.py'
    program.write_text("""
import copy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group('gloo')
rank = dist.get_rank()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        # Registered in another order than that of the backward pass.
        self.last, self.first, self.middle = nn.Linear(64, 1), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, inputs):
        return self.last(self.middle(self.first(inputs).tanh()).tanh())


def build(remedy):
    model = DistributedDataParallel(Model(), bucket_cap_mb=0.02,
                                    find_unused_parameters=remedy == 'unused')
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(model, optimizer, steps):
    for step in steps:
        inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(step * 100 + rank))
        optimizer.zero_grad()
        model(inputs).pow(2).mean().backward()
        optimizer.step()


for remedy in ('none', 'backward', 'unused'):
    model, optimizer = build(remedy)
    train(model, optimizer, range(4))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(4, 8))
    resumed, optimizer = build(remedy)
    if remedy == 'backward':
        resumed(torch.zeros(2, 64)).sum().backward()
        resumed.zero_grad()
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(resumed, optimizer, range(4, 8))
    print(remedy, all(map(torch.equal, model.parameters(), resumed.parameters())))
dist.destroy_process_group()
""")
    run = run_ranks(program, ranks=3, timeout=120)
    assert run.statuses == [0, 0, 0], run.outputs
    said = run.outputs[0].splitlines()
    assert {'none False', 'backward True', 'unused True'} <= set(said), said
