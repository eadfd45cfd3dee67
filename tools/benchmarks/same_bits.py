"""Train a config with V virtual ranks on several numbers of processes, and compare the bits.

    python tools/benchmarks/same_bits.py [CONFIG] [--processes 8 1 2 3 5] [--steps 30]
        [--moves 10] [--accelerator cpu] [--cfg-options ...]

CONFIG may sample dynamically or read features from a cache. Each run is started by the user's
launcher; one process is also started without a launcher. With --moves N one more run is killed
(SIGKILL, all its processes) N times at a random step and resumed on a random number of processes:
"3>12" in its name means killed on 3 processes behind the log line of step 12. The table has, for
each run: seconds a step (median), whether the
logged losses are equal digit for digit, and how many tensors and numbers of the last checkpoint
(weights, buffers, optimizer, schedulers, averages) differ from the first run's. The exit status
is 1 if any does.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests'), str(ROOT / 'tools' / 'benchmarks')]

from _common import describe_machine  # noqa: E402
from checkpoint_bits import checkpoint_bits  # noqa: E402


def start(args, work: Path, processes: int, *options: str) -> subprocess.Popen:
    """Start a run in a new session."""
    settings = [
        f'env_cfg.virtual_ranks={args.virtual_ranks}',
        f'train_cfg.max_iters={args.steps}',
        'train_cfg.val_interval=100000',
        'default_hooks.logger.interval=1',
        f'default_hooks.checkpoint.interval={args.interval}',
        *args.cfg_options,
    ]
    command = [str(ROOT / 'tools' / 'train.py')]
    if processes > 1:
        command = [
            str(ROOT / 'tools' / 'launch.py'),
            '--nnodes',
            '1',
            '--nproc_per_node',
            str(processes),
            '--rdzv_backend',
            'c10d',
            '--rdzv_endpoint',
            'localhost:0',
            str(ROOT / 'tools' / 'train.py'),
        ]
    command += [
        args.config,
        *(['--launcher', 'pytorch'] if processes > 1 else []),
        '--work-dir',
        str(work),
        '--accelerator',
        args.accelerator,
        *options,
        '--cfg-options',
        *settings,
    ]
    work.mkdir(parents=True, exist_ok=True)
    with open(work / 'output.txt', 'a') as output:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=dict(os.environ, OMP_NUM_THREADS='1', MKL_NUM_THREADS='1'),
        )


def logged(work: Path) -> dict:
    """Return loss and time by step, the last run's where several have logged a step."""
    found = {}
    for path in sorted(work.glob('*/vis_data/scalars.json')):
        for line in path.read_text().splitlines():
            try:
                each = json.loads(line)
            except ValueError:  # the process was killed while it wrote
                continue
            if 'loss' in each:
                found[each['step']] = each
    return found


def move(args, work: Path) -> str:
    """Carry out a run that is killed and resumed; return its story."""
    story, rng = [], random.Random(args.seed)
    for number in range(args.moves + 1):
        processes = rng.choice(args.processes)
        last = (
            args.steps
            if number == args.moves
            else max(logged(work), default=0)
            + rng.randint(1, max(1, 2 * args.steps // (args.moves + 1) - 1))
        )
        run = start(args, work, processes, *(['--resume', 'auto'] if number else []))
        while run.poll() is None:
            if last < args.steps and max(logged(work), default=0) >= last:
                os.killpg(run.pid, signal.SIGKILL)
            time.sleep(0.05)
        ended = f'>{max(logged(work), default=0)}' if run.returncode == -signal.SIGKILL else ''
        story.append(f'{processes}{ended}')
        time.sleep(1)  # ranks are tied to their launcher
    return 'moved ' + ' '.join(story)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument(
        'config', nargs='?', default=str(ROOT / 'configs/demo/efficientnet_lite0_fpn_demo.py')
    )
    parser.add_argument('--processes', type=int, nargs='+', default=[8, 1, 2, 3, 5])
    parser.add_argument('--virtual-ranks', type=int, default=8)
    parser.add_argument('--steps', type=int, default=30)
    parser.add_argument('--interval', type=int, default=5, help='steps between checkpoints')
    parser.add_argument('--moves', type=int, default=0)
    parser.add_argument('--seed', type=int, default=0, help='of the moves')
    parser.add_argument('--accelerator', default='cpu')
    parser.add_argument('--cfg-options', nargs='+', default=[])
    args = parser.parse_args()
    subprocess.run(
        [sys.executable, str(ROOT / 'tools' / 'make_demo_data.py'), 'data/demo'],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    print(describe_machine())
    folder, first, worst = Path(tempfile.mkdtemp(prefix='same_bits')), None, 0
    print(f'{"processes":28} s a step  losses     differ')
    for processes in [*args.processes, *([0] if args.moves else [])]:
        work = folder / str(processes)
        name = str(processes)
        if processes:
            start(args, work, processes).wait()
        else:
            name = move(args, work)
        path = work / f'iter_{args.steps}.pth'
        if not path.exists():
            print(f'{name}: no {path}; see {work}/output.txt')
            return 1
        steps = logged(work)
        losses = [steps[step]['loss'] for step in sorted(steps)]
        result = losses, checkpoint_bits(path)
        first = first or result
        differ = [
            place
            for place in {**first[1], **result[1]}
            if first[1].get(place) != result[1].get(place)
        ]
        same = 'equal' if losses == first[0] else 'DIFFER'
        worst += len(differ) + (losses != first[0])
        print(
            f'{name:28} {statistics.median(each["time"] for each in steps.values()):8.3f}  '
            f'{same:9}  {len(differ)} of {len(result[1])} {differ[:3] if differ else ""}',
            flush=True,
        )
    return int(worst > 0)


if __name__ == '__main__':
    sys.exit(main())
