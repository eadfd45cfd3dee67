"""Does `mapsage tune CONFIG` choose the fastest combination of options?

    python tools/benchmarks/tune_choice.py [--cases ...] [--threads 1 2] [--rounds 6]

For each model and number of threads, it chooses among the combinations of bfloat16, channels
last and a fused optimizer. Then all combinations are measured again, in turn, with the config as it
is before and after each round, and the choice is compared with the best of them. Times are
processor time of the main thread, which takes part in all computations. The cases are those of
`step_overhead.py`.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Dict, List

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import torch  # noqa: E402
from _common import describe_machine, write_tiles  # noqa: E402
from mmengine.registry import init_default_scope  # noqa: E402
from step_overhead import make_config  # noqa: E402

CASES = ['r18-128-2', 'eff-128-2', 'mit-128-2']


def compare(case: str, threads: int, rounds: int, budget: float) -> str:
    """Return the row of a case: the choice, the best combination, and how far they differ."""
    init_default_scope('mmseg')
    torch.set_num_threads(threads)
    from mapsage.accelerator import resolve_accelerator, set_current_accelerator
    from mapsage.extras.forensics.tuning.command import Tuning
    from mapsage.extras.forensics.tuning.options import Variant, combine, step_options

    with tempfile.TemporaryDirectory() as folder:
        data = write_tiles(Path(folder) / 'data', size=int(case.split('-')[1]))
        cfg = make_config(case, data, Path(folder) / 'work', 1)
        accelerator = set_current_accelerator(resolve_accelerator('cpu'))
        accelerator.set_device(0)
        args = argparse.Namespace(config=case, compile=False, cfg_options=None)
        tuning = Tuning(
            args,
            cfg,
            accelerator,
            time.perf_counter(),
            budget,
            lambda text: print(text, file=sys.stderr),
        )
        tuning.bench.calibrate(tuning.base)
        options = step_options(cfg, tuning.bench.model, accelerator)
        _, chosen = tuning.choose_options(options, tuning.base)
        variants = [tuning.base, *combine(options, threads)]
        seconds: Dict[Variant, List[float]] = {variant: [] for variant in variants}
        for number in range(rounds):
            for variant in variants if number % 2 else variants[::-1]:
                seconds[variant].append(tuning.bench.visit(variant).seconds)
    medians = {variant: statistics.median(times) for variant, times in seconds.items()}
    best, choice = min(variants, key=lambda variant: medians[variant]), chosen or tuning.base
    ratios = sorted(a / b for a, b in zip(seconds[choice], seconds[best]))
    spread = max(
        abs(time_ - medians[choice]) / medians[choice]
        for time_ in statistics.quantiles(seconds[choice], n=4)
    )
    behind = medians[choice] / medians[best] - 1
    verdict = 'yes' if behind <= max(0.1, spread) else '**no**'
    return (
        f'| {case} | {threads} | {1000 * medians[tuning.base]:.1f} | {choice.name}, '
        f'{medians[tuning.base] / medians[choice]:.2f} | {best.name}, '
        f'{medians[tuning.base] / medians[best]:.2f} | {100 * behind:.1f} % '
        f'({ratios[0]:.2f}-{ratios[-1]:.2f}) | {spread:.2f} | {verdict} |'
    )


def main() -> None:
    """Compare all cases, each in a process."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--cases', nargs='+', default=CASES)
    parser.add_argument('--threads', nargs='+', type=int, default=[1, 2])
    parser.add_argument('--rounds', type=int, default=6)
    parser.add_argument('--budget', type=float, default=115.0, help='seconds of a tuning')
    args = parser.parse_args()
    if len(args.cases) == 1 and len(args.threads) == 1:
        warnings.simplefilter('ignore')
        print(compare(args.cases[0], args.threads[0], args.rounds, args.budget))
        return
    print(f'{describe_machine()}, tunings of {args.budget:.0f} s, then {args.rounds} rounds')
    print(
        '| case | threads | as configured, ms | choice of mapsage tune, speed | best, speed | choice '
        f'behind the best (rounds) | spread | within 10 % or it |\n|{"---|" * 8}',
        flush=True,
    )
    for case in args.cases:
        for threads in args.threads:
            command = [
                sys.executable,
                __file__,
                '--cases',
                case,
                '--threads',
                str(threads),
                '--rounds',
                str(args.rounds),
                '--budget',
                str(args.budget),
            ]
            rows = subprocess.run(
                command,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, 'OMP_NUM_THREADS': str(threads)},
            ).stdout
            print('\n'.join(row for row in rows.splitlines() if row.startswith('|')), flush=True)


if __name__ == '__main__':
    main()
