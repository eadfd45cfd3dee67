"""The tasks that an accelerator needs in every iteration: its random state, and a flush."""
from __future__ import annotations

import random
from typing import Any, Dict, Optional

import numpy as np
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mapsage.accelerator import current_accelerator, derived_seed
from mapsage.wrappers import VirtualDataParallel


def seed_rank(*entropy: int) -> None:
    """Seed the generators of Python, NumPy and the accelerator from non-negative integers."""
    seed = derived_seed(*entropy)
    random.seed(seed)
    np.random.seed(seed)
    current_accelerator().seed(seed)


def _seed_step(runner: Any, virtual_rank: int) -> None:
    # The leading 1 makes these seeds differ from those of samples.
    seed_rank(1, runner.seed, virtual_rank, runner.iter)


@HOOKS.register_module()
class AcceleratorHook(Hook):
    """Hook that seeds each step and flushes lazy devices.

    - Before a training step the random state of the device is derived from (seed, virtual rank,
      iteration), so that dropout in a resumed run equals that in an uninterrupted one, on any
      number of processes. The ranks of a head replica count as one rank here.
    - After the step a lazy device runs the operations it has recorded, before any hook reads a
      loss. Reading a loss first would compile one more graph in every iteration.

    ``MapSageRunner`` registers it ahead of MMEngine's ``RuntimeInfoHook``, which reads the losses.
    """

    priority = 'HIGHEST'
    _seeded: Any = None  # the model whose virtual ranks are seeded

    def before_train(self, runner: Any) -> None:
        """Have each virtual rank of this process seeded when its turn comes."""
        if isinstance(runner.model, VirtualDataParallel) and self._seeded is not runner.model:
            self._seeded = runner.model  # a second train() finds it there
            runner.model.on_virtual_rank_start.append(
                lambda virtual_rank, batch: _seed_step(runner, virtual_rank))

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Seed the generators for this step."""
        _seed_step(runner, self._data_rank(runner))

    @staticmethod
    def _data_rank(runner: Any) -> int:
        """Return the number that all ranks of one head replica have, so that they draw alike."""
        if isinstance(runner.model, VirtualDataParallel):
            return runner.model.block.start
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

    def before_save_checkpoint(self, runner: Any, checkpoint: Dict[str, Any]) -> None:
        """Write the number of virtual ranks into the checkpoint, which is fixed for the run."""
        ranks = getattr(runner, 'virtual_ranks', None)
        if ranks is not None and not hasattr(runner.model, 'replicas'):
            checkpoint['meta']['virtual_ranks'] = ranks.count

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                       outputs: Any = None) -> None:
        """Flush the operations of a validation step."""
        current_accelerator().flush()

    def after_test_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                        outputs: Any = None) -> None:
        """Flush the operations of a test step."""
        current_accelerator().flush()
