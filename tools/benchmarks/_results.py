"""Results of long benchmarks: kept line by line, so that a killed benchmark continues where it was."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

Row = Dict[str, Any]


class Results:
    """Rows of a JSON-lines file, each found by what it is the result of."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def rows(self) -> List[Row]:
        """Return the rows; a last line that was cut off by a kill does not count."""
        if not self.path.exists():
            return []
        whole = self.path.read_text().split('\n')[:-1]
        return [json.loads(line) for line in whole]

    def get(self, **key: Any) -> Optional[Row]:
        """Return the first row with these values, or None."""
        for row in self.rows():
            if all(row.get(name) == value for name, value in key.items()):
                return row
        return None

    def get_or_run(self, work: Callable[[], Row], in_process: bool = False, **key: Any) -> Row:
        """Return the row of ``key``; if there is none, do the work in a forked process.

        With ``in_process`` the work is done in this process, which a card that is in use needs.
        """
        found = self.get(**key)
        if found is None:
            found = dict(key, **(work() if in_process else in_fork(work)))
            self._append(found)
            print(json.dumps(found), flush=True)
        return found

    def _append(self, row: Row) -> None:
        if self.path.exists():  # without a line that a kill has cut off
            os.truncate(str(self.path), self.path.read_bytes().rfind(b'\n') + 1)
        with open(str(self.path), 'a') as file:
            file.write(json.dumps(row) + '\n')


def in_fork(work: Callable[[], Row]) -> Row:
    """Return the result of some work in a fork of this process, which has imported everything.

    The fork ends with this process, however that ends.
    """
    from mapsage.distributed import die_with_launcher

    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        die_with_launcher()
        status = 1
        try:
            os.write(writer, json.dumps(work()).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(writer)
    with open(reader) as pipe:
        text = pipe.read()
    if os.waitpid(pid, 0)[1]:
        raise SystemExit(
            'a run ended with an error, which is above; the results of those before it are kept'
        )
    return json.loads(text)


def run_timed(runner: Any) -> List[float]:
    """Train; return the processor time of this process at the start and after each step, in s.

    The first batch is not in it.
    """
    from mmengine.hooks import Hook

    times: List[float] = []

    class Clock(Hook):
        def before_train_iter(self, *_: Any, **__: Any) -> None:
            if not times:
                times.append(time.process_time())

        def after_train_iter(self, *_: Any, **__: Any) -> None:
            times.append(time.process_time())

    runner.register_hook(Clock(), priority='LOWEST')
    runner.train()
    return times


def ious_of(runner: Any) -> List[float]:
    """Return the IoU of each class in percent, behind a validation."""
    matrix = runner.val_evaluator.metrics[0].matrix.astype(float)
    hits = np.diag(matrix)
    union = matrix.sum(0) + matrix.sum(1) - hits
    return (100 * hits / np.maximum(union, 1)).round(2).tolist()


def mean_of(ious: Sequence[float], classes: Sequence[int]) -> float:
    """Return the mean IoU of some classes in percent."""
    return round(float(np.mean([ious[number] for number in classes])), 2)


def rare_classes(cfg: Any) -> Row:
    """Return the third of the classes that has the fewest pixels in a config's training labels."""
    from mmengine.registry import DATASETS, init_default_scope

    init_default_scope('mmseg')
    dataset = DATASETS.build(
        dict(cfg.train_dataloader.dataset, pipeline=cfg.val_dataloader.dataset.pipeline)
    )
    names = dataset.metainfo['classes']
    pixels = np.zeros(len(names), np.int64)
    for index in range(len(dataset)):
        labels = dataset[index]['data_samples'].gt_sem_seg.data.numpy().ravel()
        pixels += np.bincount(labels[labels < len(names)], minlength=len(names))
    order = np.argsort(pixels, kind='stable')[: max(1, round(len(names) / 3))]
    return dict(
        classes=sorted(map(int, order)),
        names=[names[index] for index in sorted(order)],
        shares=(100 * pixels / pixels.sum()).round(2).tolist(),
    )


def spread(values: Sequence[float]) -> str:
    """Return mean, lowest and highest value as a cell of a table."""
    mean = f'{np.mean(values):.1f}'
    return mean if len(values) == 1 else f'{mean} ({min(values):.1f} to {max(values):.1f})'


def write_demo(root: Path) -> str:
    """Write the demo's tiles if they are not there, and return their folder."""
    from mapsage.extras.demo import write_demo_data

    if not (root / 'ann_dir/val').is_dir():
        write_demo_data(root)
    return str(root)
