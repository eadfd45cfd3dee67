"""What travels between simulated cards while the shipped configs train, shrunk, on two of them.

    OMP_NUM_THREADS=1 python tests/card_traffic.py [--profile 2.11] [part of a config's name ...]

Every operation on card tensors, its dtype and the module that asked for it is compared with
:func:`unwanted`. docs/reference/simulator.md has the result.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, Set, Tuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import mapsage  # noqa: E402, F401  (closes the hosts' gaps)

from mmengine.config import Config  # noqa: E402  isort: skip
from small_configs import shipped_configs, small_options, write_data  # noqa: E402
from support import ROOT, launch  # noqa: E402

# Operation, dtype, calling module ('autograd' for DDP's reducer).
Entry = Tuple[str, str, str]

# DDP compares shapes in int64 at its start, and broadcasts buffers such as BatchNorm's counters.
DDP = ('torch.nn.parallel.distributed', 'torch.distributed.utils')
WIDE = ('int64', 'float64')
# Of what a config needs and the cards cannot do, the error must hold this.
REFUSED = {'configs/demo/vit_tiny_frozen_demo_replicas.py': 'ranks_per_head=2 on accelerator'}
USED = ('ALLREDUCE', 'BROADCAST', 'ALLGATHER', 'ALLTOALL_BASE')


def unwanted(entry: Entry) -> bool:
    """Return whether cards of some version refuse an operation, or leave its output unwritten.

    A barrier on a card is an all-reduce of uint8. 64-bit numbers are DDP's own only, and never
    reduced.
    """
    operation, dtype, caller = entry
    if operation not in USED or (operation == 'ALLREDUCE' and dtype == 'uint8'):
        return True
    return dtype in WIDE and not (caller in DDP and operation in ('BROADCAST', 'ALLGATHER'))


def traffic_of(name: str, profile: str, folder: Path) -> Set[Entry]:
    """Train a config for two steps on two simulated cards, and return what has travelled.

    The variables of :func:`write_data` must be set.
    """
    cfg = Config.fromfile(str(ROOT / name))
    # The weights of a run that some configs begin with do not matter here.
    cfg.merge_from_dict({**small_options(cfg), 'env_cfg.accelerator': 'sim', 'load_from': None})
    if any(hook.get('prefetch') for hook in cfg.get('custom_hooks', [])):
        cfg.train_dataloader.num_workers = 1
    config, traffic = folder / f'{Path(name).stem}.py', folder / 'traffic'
    traffic.mkdir(parents=True)
    cfg.dump(str(config))
    encoders = cfg.get('feature_source', {}).get('encoders', 0)
    ended = launch(
        config,
        '--work-dir',
        folder / 'work',
        ranks=2 + encoders,
        environ={
            'ENCODERS': str(encoders),
            'MAPSAGE_SIM_GCU': profile,
            'MAPSAGE_SIM_TRAFFIC': str(traffic),
        },
    )
    if ended.status or ended.left_running:
        raise AssertionError(f'{name}: {ended.final_error or ended.output[-3000:]}')
    return {
        tuple(json.loads(line))
        for path in traffic.glob('*.jsonl')
        for line in path.read_text().splitlines()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('parts', nargs='*', help='parts of the names of the configs to run')
    parser.add_argument('--profile', default='2.11', help='value of MAPSAGE_SIM_GCU')
    arguments = parser.parse_args()
    names = [
        name
        for name in shipped_configs()
        if not arguments.parts or any(part in name for part in arguments.parts)
    ]
    counts: Dict[Entry, int] = {}
    failed = 0
    with tempfile.TemporaryDirectory() as root:
        os.environ.update(write_data(Path(root, 'data')))
        if any('geotiff' in name for name in names):
            os.environ['MAPSAGE_GEOTIFF'] = str(Path(root, 'geotiff'))
            subprocess.run(
                [
                    sys.executable,
                    str(ROOT / 'tools/make_demo_data.py'),
                    os.environ['MAPSAGE_GEOTIFF'],
                    '--geotiff',
                ],
                check=True,
            )
        for number, name in enumerate(names):
            try:
                entries = traffic_of(name, arguments.profile, Path(root, str(number)))
            except AssertionError as error:
                if REFUSED.get(name, '\0') in str(error):
                    print(f'{name}: refused', flush=True)
                    continue
                print(f'FAILED {error}', flush=True)
                failed += 1
                continue
            for entry in entries:
                counts[entry] = counts.get(entry, 0) + 1
            wrong = sorted(filter(unwanted, entries))
            failed += bool(wrong)
            print(
                f'{name}: {len(entries)} kinds{" UNWANTED " + str(wrong) if wrong else ""}',
                flush=True,
            )
    print(f'\n| operation | dtype | asked for by | configs of {len(names)} |\n|---|---|---|---|')
    for (operation, dtype, caller), count in sorted(counts.items()):
        print(f'| {operation} | {dtype} | {caller} | {count} |')
    return int(failed > 0)


if __name__ == '__main__':
    sys.exit(main())
