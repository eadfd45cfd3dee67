"""The tasks that an accelerator needs in every iteration: its random state, and a flush."""
from __future__ import annotations

import random
from typing import Any, Optional

import numpy as np
from mmengine.dist import broadcast, get_rank, is_distributed
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mapsage.accelerator import current_accelerator, derived_seed


def seed_rank(*entropy: int) -> None:
    """Seed the generators of Python, NumPy and the accelerator from non-negative integers."""
    seed = derived_seed(*entropy)
    random.seed(seed)
    np.random.seed(seed)
    current_accelerator().seed(seed)


@HOOKS.register_module()
class AcceleratorHook(Hook):
    """Hook that seeds each step, flushes lazy devices, and equalizes buffers before validation.

    - Before a training step the random state of the device is derived from (seed, rank,
      iteration), so that dropout in a resumed run equals that in an uninterrupted one. The ranks of
      a head replica count as one rank here.
    - After the step a lazy device runs the operations it has recorded, before any hook reads a
      loss. Reading a loss first would compile one more graph in every iteration.
    - Before validation every rank gets the buffers of rank 0. During training each rank has its own
      BatchNorm statistics; the checkpoint holds those of rank 0, and these are evaluated.

    ``MapSageRunner`` registers it ahead of MMEngine's ``RuntimeInfoHook``, which reads the losses.
    """

    priority = 'HIGHEST'

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Seed the generators for this step."""
        # The leading 1 makes these seeds differ from those of samples.
        seed_rank(1, runner.seed, self._data_rank(runner), runner.iter)

    @staticmethod
    def _data_rank(runner: Any) -> int:
        """Return the number that all ranks of one head replica have, so that they draw alike."""
        replicas = getattr(runner.model, 'replicas', None)
        return get_rank() if replicas is None else replicas.index

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Optional[dict] = None) -> None:
        """Flush the device, and record its peak memory in MiB if MMEngine does not."""
        accelerator = current_accelerator()
        accelerator.flush()
        peak = None if accelerator.name == 'cuda' else accelerator.max_memory_allocated()
        if peak is not None:
            runner.message_hub.update_scalar('train/memory', peak / 2**20)

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                       outputs: Any = None) -> None:
        """Flush the operations of a validation step."""
        current_accelerator().flush()

    def after_test_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                        outputs: Any = None) -> None:
        """Flush the operations of a test step."""
        current_accelerator().flush()

    def before_val_epoch(self, runner: Any) -> None:
        """Copy the buffers of rank 0 to every rank. Collective."""
        if is_distributed():
            for buffer in runner.model.buffers():
                broadcast(buffer, src=0)
