"""Time from the launch command to the first training step, and where it goes.

    python tools/benchmarks/launch_time.py [CONFIG] [--ranks N]

The data of the config must exist; for the demo config tools/make_demo_data.py data/demo makes it.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / 'tools' / 'benchmarks'))
PHASES = (
    'the launcher has started the rank',
    'torch and MMSegmentation are imported',
    'process group, model and wrapper are ready',
    'data is indexed, weights are initialized',
    'first step is done',
)
TIMED = """
_base_ = [{base!r}]
custom_imports = dict(imports=['mapsage', 'timeline_hook'])
custom_hooks = [dict(type='TimelineHook')]
train_cfg = dict(max_iters=1)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('config', nargs='?', default='configs/demo/efficientnet_lite0_fpn_demo.py')
    parser.add_argument(
        '--ranks', type=int, help='default: one for each visible card; 8 where there is none'
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder) / 'marks'
        marks.mkdir()
        environ = dict(
            os.environ,
            MAPSAGE_PYTHON=sys.executable,
            MAPSAGE_TIMELINE=str(marks),
            PYTHONPATH=str(Path(__file__).parent),
        )
        if args.ranks is not None:
            environ['NPROC_PER_NODE'] = str(args.ranks)
        config = Path(folder) / 'timed.py'
        config.write_text(TIMED.format(base=str(Path(args.config).resolve())))
        start = time.time()
        subprocess.run(
            [
                'bash',
                str(ROOT / 'scripts/start_8card_training.sh'),
                config,
                '--work-dir',
                f'{folder}/work',
            ],
            env=environ,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        ranks = [json.loads(path.read_text()) for path in sorted(marks.iterdir())]
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    # The step is collective, so the slowest rank in each phase is what everybody waits for.
    ends = [max(rank[phase] for rank in ranks) - start for phase in range(len(PHASES))]
    print(f'{len(ranks)} ranks, seconds after the command, until on the slowest rank ...')
    for name, end, before in zip(PHASES, ends, [0.0] + ends):
        print(f'{name:<45} {end:7.1f}  (+{end - before:.1f})')
    print(
        f'processor seconds of all processes, until all have ended: '
        f'{used.ru_utime + used.ru_stime:.1f}'
    )


if __name__ == '__main__':
    main()
