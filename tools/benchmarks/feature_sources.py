"""Steps a second of a linear head, its frozen encoder local, ahead, or on separate ranks.

    python tools/benchmarks/feature_sources.py [--arch small] [--heads 2] [--encoders 2]
    python tools/benchmarks/feature_sources.py --arch large --encoder-accelerator cuda --encoders 1

DINOv3 with random weights and a linear head, 224x224, batches of 4 on each head rank, one thread a
process; each way is a run of the launcher's, in turns. `of it waiting` is the time a head
stood still for features, as the log has it, `of it loading` that for the loader, which for sources
that work ahead includes sending. The first quarter of the steps is left out.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

from _common import describe_machine, write_tiles  # noqa: E402
from feature_cache import BATCH, CONFIG, SIDE  # noqa: E402

from mapsage.models.backbones.dinov3_weights import ARCHS  # noqa: E402

_SUMMARY = re.compile(r'\[Features\] of ([\d.]+) s: .*?waited ([\d.e+-]+)')


def run(
    config: Path, work: Path, source: Dict[str, Any], ranks: int, accelerator: str
) -> Tuple[float, ...]:
    """Return the median seconds of a step and of its loading, and the share of waiting."""
    path = config.with_name(f'{work.name}.py')
    path.write_text(f'{config.read_text()}feature_source = {source!r}\n')
    environ = {
        **os.environ,
        'NPROC_PER_NODE': str(ranks),
        'OMP_NUM_THREADS': '1',
        'ACCELERATOR': accelerator,
        'MAPSAGE_PYTHON': sys.executable,
    }
    done = subprocess.run(
        [
            'bash',
            str(ROOT / 'scripts' / 'start_8card_training.sh'),
            str(path),
            '--work-dir',
            str(work),
            '--cfg-options',
            'log_level=INFO',
        ],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    if done.returncode:
        sys.exit(done.stdout)
    file = next(work.glob('*/vis_data/scalars.json'))
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    steps = steps[len(steps) // 4 :]
    told = [(float(total), float(waited)) for total, waited in _SUMMARY.findall(done.stdout)]
    told = told[len(told) // 4 :]
    waited = statistics.mean(each for _, each in told) if told else 0.0
    return (
        statistics.median(step['time'] for step in steps),
        statistics.median(step['data_time'] for step in steps),
        waited,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--arch', default='small', help='of DINOv3ViT (default: small)')
    parser.add_argument('--tiles', type=int, default=64, help='images an epoch (default: 64)')
    parser.add_argument('--heads', type=int, default=2)
    parser.add_argument('--encoders', type=int, default=2)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--accelerator', default='cpu', help='of the heads (default: cpu)')
    parser.add_argument('--encoder-accelerator', help="(default: the heads')")
    args = parser.parse_args()
    ways = {
        'local': (dict(type='Local'), args.heads),
        'prefetched': (dict(type='Prefetched'), args.heads),
        'streamed': (
            dict(type='Streamed', encoders=args.encoders, accelerator=args.encoder_accelerator),
            args.heads + args.encoders,
        ),
    }
    times: Dict[str, List[Tuple[float, ...]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, 'config.py')
        config.write_text(
            CONFIG.format(
                batch=BATCH,
                root=str(write_tiles(Path(folder, 'data'), args.tiles, SIDE)),
                side=SIDE,
                arch=args.arch,
                dims=ARCHS[args.arch].embed_dims,
                epochs=2,
            )
        )
        for number in range(args.rounds):
            for way, (source, ranks) in ways.items():
                start = time.monotonic()
                times[way].append(
                    run(config, Path(folder, f'{number}_{way}'), source, ranks, args.accelerator)
                )
                print(
                    f'round {number + 1} of {args.rounds}, {way}: {time.monotonic() - start:.0f} s',
                    file=sys.stderr,
                    flush=True,
                )
    print(
        f'{describe_machine()}. {args.arch}, batches of {BATCH}, {args.heads} head rank(s), '
        f'{args.encoders} encoder(s) when streamed, {args.accelerator} and '
        f'{args.encoder_accelerator or args.accelerator}; medians of {args.rounds} rounds.\n'
    )
    print('| | steps/s | of local | s a step | of it loading | of it waiting |')
    print('|---|---|---|---|---|---|')
    for way, rounds in times.items():
        step, loading, waited = (statistics.median(each) for each in zip(*rounds))
        ratio = statistics.median(one[0] / other[0] for one, other in zip(times['local'], rounds))
        print(
            f'| {way} | {1 / step:.2f} | {ratio:.2f} | {step:.3f} | {loading:.3f} | {waited:.3f} |'
        )


if __name__ == '__main__':
    main()
