"""Processor time of a loader's worker without decoding, in milliseconds a window of 512.

    OMP_NUM_THREADS=1 python tools/benchmarks/loader_workers.py [--against CHECKOUT]

The images and labels of a batch lie in memory, so that nothing is decoded. A worker seeds, packs
and checks every sample and hands a batch of 8 over; the rank opens and preprocesses it. One process
plays worker and rank. Two checkouts, in two processes, take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Dict, List

ROOT = Path(os.environ.get('MEASURED_CHECKOUT', Path(__file__).resolve().parents[2]))
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.multiprocessing  # noqa: E402
from _common import describe_machine  # noqa: E402
from mmengine.dataset import pseudo_collate  # noqa: E402
from mmseg.datasets import BaseSegDataset  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torch.utils.data._utils import worker  # noqa: E402

SIDE, BATCH = 512, 8


class Windows(BaseSegDataset):
    """Windows that are decoded already, of 7 classes."""

    METAINFO = dict(classes=tuple('abcdefg'), palette=[[9 * number] * 3 for number in range(7)])

    def load_data_list(self) -> List[Dict[str, Any]]:
        """Decode the windows."""
        random = np.random.RandomState(0)
        return [
            dict(
                img=random.randint(0, 256, (SIDE, SIDE, 3), np.uint8),
                gt_seg_map=random.randint(0, 7, (SIDE, SIDE)).astype(np.uint8),
                img_path=f'{number}.png',
                seg_map_path=f'{number}.png',
                ori_shape=(SIDE, SIDE),
                img_shape=(SIDE, SIDE),
                flip=True,
                flip_direction='horizontal',
                reduce_zero_label=False,
            )
            for number in range(3 * BATCH)
        ]

    def get_data_info(self, idx: int) -> Dict[str, Any]:
        """Return a window as a pipeline reads it."""
        return dict(self.data_list[idx], seg_fields=['gt_seg_map'])


def serve(narrow: bool) -> None:
    """Time a batch in the worker and in the rank for each line of the input."""
    from mapsage.datasets import SegDataPreProcessor
    from mapsage.datasets.packing import PackSegInputs
    from mapsage.engine.loading.data_checks import check_labels, explain_error
    from mapsage.engine.loading.data_order import with_seed
    from mapsage.engine.loading.keyed_loader import KeyedLoader

    torch.set_num_threads(1)
    dataset = Windows(serialize_data=False, pipeline=[dict(type=PackSegInputs)])
    loader: Any = KeyedLoader(
        DataLoader(dataset, BATCH, num_workers=1, collate_fn=pseudo_collate),  # type: ignore[arg-type]
        check_labels,
        explain_error,
    )
    loader.samples.narrow = narrow
    preprocess = SegDataPreProcessor(mean=[120.0] * 3, std=[60.0] * 3, size=(SIDE, SIDE))
    collate, widen = pseudo_collate, lambda batch: None
    # This process plays the worker, so torch must find the facts of a worker.
    worker._worker_info = worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=loader.samples)
    loader.samples._tied_to_parent = True
    try:
        from mapsage.datasets.byte_labels import widen_batch
        from mapsage.datasets.packing import last_packers
        from mapsage.engine.loading.shared_batches import SharedCollate

        collate = SharedCollate.around(pseudo_collate)
        for packer in last_packers(dataset):
            packer.keeps_bytes = True
        widen = widen if narrow else widen_batch
    # A checkout from before.
    except ImportError:
        pass
    number = 0
    for line in sys.stdin:
        times: List[List[float]] = [[], []]
        for _ in range(int(line)):
            keys = [with_seed(k % len(dataset), (0, 0, k)) for k in range(number, number + BATCH)]
            number += BATCH
            begin = time.thread_time()
            sent = ForkingPickler.dumps(collate(loader.samples.__getitems__(keys)))
            times[0].append((time.thread_time() - begin) / BATCH * 1e3)
            begin = time.thread_time()
            batch = ForkingPickler.loads(sent)
            if hasattr(batch, 'unpack'):
                batch = batch.unpack()
            widen(batch)
            preprocess(batch, True)
            times[1].append((time.thread_time() - begin) / BATCH * 1e3)
            del batch, sent
        print(json.dumps([[statistics.median(values) for values in times]]), flush=True)


def main() -> None:
    """Print a table of both checkouts."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--against', type=Path, default=ROOT, help='folder of the other checkout')
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--batches', type=int, default=8, help='batches in a round')
    parser.add_argument('--serve', choices=['narrow', 'wide'], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve == 'narrow')
        return
    print(f'{describe_machine()}, load {os.getloadavg()[0]:.1f}')
    print('| run | who | other checkout, ms | this checkout, ms | ratio |\n|---|---|---|---|---|')
    for kind, name in (('narrow', 'on a card'), ('wide', 'on the CPU')):
        processes = [
            subprocess.Popen(
                [sys.executable, '-W', 'ignore', str(Path(__file__).resolve()), '--serve', kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=str(checkout),
                env=dict(os.environ, MEASURED_CHECKOUT=str(checkout)),
            )
            for checkout in (args.against.resolve(), ROOT)
        ]
        rounds: List[List[List[float]]] = []
        for _ in range(args.rounds + 1):
            row = []
            for process in processes:
                assert process.stdin and process.stdout
                process.stdin.write(f'{args.batches}\n')
                process.stdin.flush()
                # Some packages print a line when they are imported.
                line = next(line for line in process.stdout if line.startswith('[['))
                row.append(json.loads(line)[0])
            rounds.append(row)
        for process in processes:
            process.communicate()
        # The first round warms up.
        for part, who in enumerate(('worker', 'rank, with the preprocessor')):
            pairs = [(row[0][part], row[1][part]) for row in rounds[1:]]
            ratios = [new / old for old, new in pairs]
            print(
                f'| {name} | {who} | {statistics.median(old for old, _ in pairs):.2f} | '
                f'{statistics.median(new for _, new in pairs):.2f} | '
                f'{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) |',
                flush=True,
            )


if __name__ == '__main__':
    main()
