"""Step time of V virtual ranks in one process against V processes, both on the same one core.

    python tools/benchmarks/virtual_ranks.py [CONFIG] [--virtual-ranks 8] [--steps 12] [--rounds 3]

The runs take turns: V processes, one process, V processes, ... Each is pinned to one core, reads
its data in its own processes (no workers) and computes with one thread. For each there is the
median step on the wall clock and the processor time of a step, summed over the processes: the
second tells the two apart where other programs use the core as well.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / 'tools' / 'benchmarks'))
WARM_UP = 3  # steps

from _common import describe_machine  # noqa: E402

TIMED = """
_base_ = [{base!r}]
custom_imports = dict(imports=['mapsage', 'step_clock_hook'])
custom_hooks = [dict(type='StepClockHook')]
env_cfg = dict(virtual_ranks={count})
train_cfg = dict(max_iters={steps})
val_dataloader = val_cfg = val_evaluator = None
train_dataloader = dict(num_workers=0, persistent_workers=False)
default_hooks = dict(checkpoint=dict(interval=100000, save_last=False))
"""


def run(args: argparse.Namespace, processes: int, core: int) -> tuple:
    """Train, and return the median seconds of a step and the processor seconds of one."""
    with tempfile.TemporaryDirectory() as folder:
        clocks = Path(folder) / 'clocks'
        clocks.mkdir()
        config = Path(folder) / 'timed.py'
        config.write_text(
            TIMED.format(
                base=str(Path(args.config).resolve()), steps=args.steps, count=args.virtual_ranks
            )
        )
        program = [
            str(ROOT / 'tools' / 'train.py'),
            str(config),
            '--accelerator',
            'cpu',
            '--work-dir',
            f'{folder}/work',
        ]
        if processes > 1:
            program = [
                str(ROOT / 'tools' / 'launch.py'),
                '--nnodes',
                '1',
                '--nproc_per_node',
                str(processes),
                '--rdzv_backend',
                'c10d',
                '--rdzv_endpoint',
                'localhost:0',
                *program,
                '--launcher',
                'pytorch',
            ]
        ended = subprocess.run(
            [sys.executable, *program],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            env=dict(
                os.environ,
                OMP_NUM_THREADS='1',
                MKL_NUM_THREADS='1',
                PYTHONPATH=str(Path(__file__).parent),
                MAPSAGE_STEP_CLOCK=str(clocks),
            ),
        )
        if ended.returncode:
            sys.exit(ended.stdout[-4000:])
        ranks = [json.loads(path.read_text())[WARM_UP:] for path in clocks.iterdir()]
    wall = [later[0] - earlier[0] for earlier, later in zip(ranks[0], ranks[0][1:])]
    processor = sum(ends[-1][1] - ends[0][1] for ends in ranks) / (len(ranks[0]) - 1)
    return statistics.median(wall), processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        'config', nargs='?', default=str(ROOT / 'configs/demo/efficientnet_lite0_fpn_demo.py')
    )
    parser.add_argument('--virtual-ranks', type=int, default=8)
    parser.add_argument('--steps', type=int, default=12)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--core', type=int, help='core that all runs use (default: the last)')
    args = parser.parse_args()
    subprocess.run(
        [sys.executable, str(ROOT / 'tools' / 'make_demo_data.py'), 'data/demo'],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    core = max(os.sched_getaffinity(0)) if args.core is None else args.core
    print(f'{describe_machine()}; load {os.getloadavg()[0]:.1f} at the start')
    several, one = [], []
    for number in range(args.rounds):
        several.append(run(args, args.virtual_ranks, core))
        one.append(run(args, 1, core))
        print(
            f'round {number + 1}: {args.virtual_ranks} processes {several[-1][0]:.3f} s a step, '
            f'processor {several[-1][1]:.3f} s; one process {one[-1][0]:.3f} s, '
            f'{one[-1][1]:.3f} s',
            flush=True,
        )
    for place, name in enumerate(('wall clock', 'processor')):
        many, single = (statistics.median(each[place] for each in runs) for runs in (several, one))
        print(
            f'{name}: one process / {args.virtual_ranks} processes = {single:.3f} s / '
            f'{many:.3f} s = {single / many:.3f}'
        )


if __name__ == '__main__':
    main()
