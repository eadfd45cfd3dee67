"""The examples run at two ranks, are resumed to the same bits, and end together."""
from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from trl_ranks import run_example, run_ranks


def test_a_loop_with_accelerate_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole = run_example('accelerate_loop.py', '--work-dir', tmp_path / 'run')
    assert 'step 40: pass rate' in whole[0]
    reward = float(re.findall(r'expected reward ([0-9.]+)', whole[0])[-1])
    assert reward > 0.5  # 0.125 by chance
    first = (tmp_path / 'run' / 'step_40' / 'model.safetensors').read_bytes()
    samplers = [torch.load(tmp_path / 'run' / 'step_40' / f'sampler_{rank}.pt')
                for rank in range(2)]
    shutil.rmtree(tmp_path / 'run' / 'step_40')
    rest = run_example('accelerate_loop.py', '--work-dir', tmp_path / 'run', '--resume-from', 20)
    assert 'step 20' not in rest[0]
    assert (tmp_path / 'run' / 'step_40' / 'model.safetensors').read_bytes() == first
    for rank, sampler in enumerate(samplers):
        again = torch.load(tmp_path / 'run' / 'step_40' / f'sampler_{rank}.pt')
        assert again['sampler'] == sampler['sampler']
        assert again['generated'] == sampler['generated']


def test_a_trl_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    output = run_example('trl_grpo.py', '--output-dir', tmp_path / 'run')[0]
    steps = re.findall(r'generated (\d+), of the final batch without a spread ([0-9.]+)', output)
    assert len(steps) == 6 and max(int(generated) for generated, _ in steps) > 16
    assert {float(share) for _, share in steps} == {0.0}
    last = tmp_path / 'run' / 'checkpoint-6'
    first = (last / 'model.safetensors').read_bytes()
    state = [torch.load(last / f'dynamic_sampling_{rank}.pt') for rank in range(2)]
    assert state[0]['sampler']['ranks'] == [0, 1, 2] and state[1]['sampler']['ranks'] == [1, 2, 2]
    shutil.rmtree(last)
    run_example('trl_grpo.py', '--output-dir', tmp_path / 'run', '--resume')
    assert (last / 'model.safetensors').read_bytes() == first
    assert [torch.load(last / f'dynamic_sampling_{rank}.pt') for rank in range(2)] == state


def test_a_grader_that_raises_on_one_rank_ends_all_ranks_with_its_text(tmp_path: Path) -> None:
    program = tmp_path / 'broken.py'
    program.write_text('''
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
''')
    run = run_ranks(program, '--output-dir', tmp_path / 'run', timeout=120)
    assert all(run.statuses)
    assert 'OSError: the grader of rank 1 has no disk' in run.outputs[1].split('\n')[-2]
    assert ('rank 1 failed in fetching or scoring samples: OSError: the grader of rank 1 has no '
            'disk') in run.outputs[0]
