"""The tasks that an accelerator needs in every iteration: its random state, and a flush.

The random state is set in each step, so that a resumed run draws the same numbers on any
number of processes. It belongs to a virtual rank and not to a process.
"""

from __future__ import annotations

from typing import Any, Dict, Optional

from mmengine.dist import get_rank
from mmengine.registry import HOOKS

from mapsage.accelerator import current_accelerator, seed_generators
from mapsage.distributed.wrappers import VirtualDataParallel
from mapsage.distributed.wrappers.rank_batches import Batch
from mapsage.distributed.wrappers.split_model import SplitModel
from mapsage.host.hook import MapSageHook
from mapsage.host.runner import HostRunner, MapSageRun


def _seed_step(runner: HostRunner, virtual_rank: int) -> None:
    # The leading 1 makes these seeds differ from the seeds of samples.
    seed_generators(1, runner.seed, virtual_rank, runner.iter)


@HOOKS.register_module()
class AcceleratorHook(MapSageHook):
    """Hook that seeds each step and flushes lazy devices.

    - Before a training step the random state of the device is derived from (seed, virtual rank,
      iteration), so that dropout in a resumed run equals dropout in an uninterrupted one, on any
      number of processes. Ranks that hold one model together count as one rank here.
    - After the step a lazy device runs the operations it has recorded, before any hook reads a
      loss. Reading a loss first would compile one more graph in every iteration.

    ``MapSageRunner`` registers it ahead of MMEngine's ``RuntimeInfoHook``, which reads the losses.
    """

    priority = 'HIGHEST'

    def before_train(self, runner: HostRunner) -> None:
        """Have each virtual rank of this process seeded before its forward pass."""
        self.follow_virtual_ranks(runner)

    def on_virtual_rank_start(self, runner: HostRunner, virtual_rank: int, batch: Batch) -> None:
        """Seed the generators for a virtual rank."""
        _seed_step(runner, virtual_rank)

    def before_train_iter(
        self, runner: HostRunner, batch_idx: int, data_batch: Optional[Batch] = None
    ) -> None:
        """Seed the generators for this step."""
        _seed_step(runner, self._data_rank(runner))

    @staticmethod
    def _data_rank(runner: HostRunner) -> int:
        """Return the number by which this process draws, the same on ranks that hold one model."""
        if isinstance(runner.model, VirtualDataParallel):
            return runner.model.block.start
        if isinstance(runner.model, SplitModel):
            return runner.model.samples_rank
        return get_rank()

    def after_train_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Dict[str, Any]] = None,
    ) -> None:
        """Flush the device, and record its peak memory in MiB if MMEngine does not."""
        accelerator = current_accelerator()
        accelerator.flush()
        peak = None if accelerator.name == 'cuda' else accelerator.max_memory_allocated()
        if peak is not None:
            runner.message_hub.update_scalar('train/memory', peak / 2**20)

    def before_save_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Write into the checkpoint what is fixed for the run: virtual ranks, fast settings."""
        if isinstance(runner, MapSageRun) and not isinstance(runner.model, SplitModel):
            checkpoint['meta']['virtual_ranks'] = runner.virtual_ranks.count
        if isinstance(runner, MapSageRun) and runner.fast:
            checkpoint['meta']['fast'] = True

    def after_val_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Any] = None,
    ) -> None:
        """Flush the operations of a validation step."""
        current_accelerator().flush()

    def after_test_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Any] = None,
    ) -> None:
        """Flush the operations of a test step."""
        current_accelerator().flush()
