"""What every iteration owes the accelerator: its random state, and a flush."""
from __future__ import annotations

import random
from typing import Any, Optional

import numpy as np
from mmengine.dist import broadcast, get_rank, is_distributed
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mapsage.accelerator import current_accelerator, derived_seed


def seed_rank(*entropy: int) -> None:
    """Seed Python's and NumPy's generators and the accelerator's from non-negative integers."""
    seed = derived_seed(*entropy)
    random.seed(seed)
    np.random.seed(seed)
    current_accelerator().seed(seed)


@HOOKS.register_module()
class AcceleratorHook(Hook):
    """Seeds each training step, flushes lazy devices once a step, and evaluates one model.

    - Before a training step the device's random state is derived from (seed, rank, iteration), so
      dropout of a resumed run equals that of one that was never stopped. The ranks of a head
      replica count as one rank here.
    - After it a lazy device runs what it has recorded, before any hook reads a loss: reading first
      would compile one more graph every iteration.
    - Before validation every rank takes rank 0's buffers. Ranks keep BatchNorm statistics of their
      own while training; the checkpoint holds rank 0's, so that is what gets evaluated.

    Registered by ``MapSageRunner`` ahead of MMEngine's ``RuntimeInfoHook``, which reads the losses.
    """

    priority = 'HIGHEST'

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Seed this step."""
        # the leading 1 keeps these apart from the seeds of samples
        seed_rank(1, runner.seed, self._data_rank(runner), runner.iter)

    @staticmethod
    def _data_rank(runner: Any) -> int:
        """Return the number that the ranks of one head replica share: they draw alike."""
        replicas = getattr(runner.model, 'replicas', None)
        return get_rank() if replicas is None else replicas.index

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Optional[dict] = None) -> None:
        """Flush, and record the peak device memory in MiB where MMEngine does not."""
        accelerator = current_accelerator()
        accelerator.flush()
        peak = None if accelerator.name == 'cuda' else accelerator.max_memory_allocated()
        if peak is not None:
            runner.message_hub.update_scalar('train/memory', peak / 2**20)

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                       outputs: Any = None) -> None:
        """Flush what evaluation recorded."""
        current_accelerator().flush()

    def after_test_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                        outputs: Any = None) -> None:
        """Flush what testing recorded."""
        current_accelerator().flush()

    def before_val_epoch(self, runner: Any) -> None:
        """Give every rank rank 0's buffers. Collective."""
        if is_distributed():
            for buffer in runner.model.buffers():
                broadcast(buffer, src=0)
