"""What a loader leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from support import PATIENT, ROOT, on_host
from torch.utils.data import DataLoader, Dataset

from mapsage.engine.loading.keyed_loader import KeyedLoader
from mapsage_launcher.stop_request import listening

pytestmark = on_host


# A process that ends while its loader has workers, as one does that keeps them between epochs.
ENDS_WITH_WORKERS = """
from torch.utils.data import DataLoader
from mapsage_launcher.stop_request import listening
from mapsage.engine.loading.keyed_loader import KeyedLoader
# MMSegmentation prints a line when it is imported.
print('imported', flush=True)

loader = KeyedLoader(DataLoader(range(6), num_workers=2, persistent_workers=True),
                           lambda *_: None, lambda *_: _[-1])
with listening(True):
    print([int(each) for each in loader])
"""


class Hanging(Dataset):
    def __init__(self) -> None:
        self.hangs = torch.multiprocessing.Event()

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        if index == 3:
            self.hangs.set()
            time.sleep(600)
        return index


def test_a_worker_outlives_a_request_and_not_its_iterator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils, 'MP_STATUS_CHECK_INTERVAL', 0.1)
    dataset = Hanging()
    loader = KeyedLoader(
        DataLoader(dataset, num_workers=1, prefetch_factor=2), lambda *_: None, lambda *_: _[-1]
    )
    with listening(True):
        batches: Any = iter(loader)
        (worker,) = batches._workers
        next(batches)
        os.kill(worker.pid, signal.SIGTERM)
        assert next(batches) == 1 and next(batches) == 2
        assert dataset.hangs.wait(PATIENT)  # one that has not come to it would end by itself
        batches._shutdown_workers()  # as torch does when the iterator goes
        worker.join(60)
    assert worker.exitcode == -signal.SIGKILL


@pytest.mark.long
def test_a_process_that_ends_with_workers_ends_without_a_word() -> None:
    ended = subprocess.run(
        [sys.executable, '-c', ENDS_WITH_WORKERS],
        cwd=str(ROOT),
        timeout=300,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    words = ended.stdout.decode().partition('imported\n')[2]
    assert (ended.returncode, words) == (0, '[0, 1, 2, 3, 4, 5]\n')
