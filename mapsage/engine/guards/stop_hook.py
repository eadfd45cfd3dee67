"""End a training after a signal, with a checkpoint from which it can continue.

A scheduler sends a signal before it ends a job, often to one process only. So the ranks agree after
each optimizer step whether any of them got one, and all stop after the same step. The signal's
handler is in `mapsage_launcher/stop_request.py`.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Optional

import torch
from mmengine.dist import is_main_process
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS

from mapsage.base.files import atomic_write
from mapsage.distributed import (
    Channel,
    SerialChannel,
    all_ranks_or_none,
    error_text,
    open_channel,
)
from mapsage.distributed.wrappers.rank_batches import Batch
from mapsage.engine.checkpoints.writer_lease import check_writer
from mapsage.host.runner import HostRunner, MapSageRun, hooks_of_type, inside_cycle
from mapsage_launcher.stop_request import STATUS, StoppedEarly, asked, leave

# One name for every stop, so that a run that is stopped repeatedly keeps only one such file.
CHECKPOINT = 'stopped.pth'


@HOOKS.register_module()
class StopHook(Hook):
    """Hook that saves a checkpoint and ends all ranks after SIGTERM or SIGUSR1 to any of them.

    After every optimizer step the ranks run one MAX all-reduce of a flag, to find out whether any
    rank was asked to stop. If so, ``stopped.pth`` is saved with everything that a resume needs,
    ``last_checkpoint`` names it, and all ranks raise :class:`StoppedEarly`, a SystemExit with
    status 85. Rerun the same command with ``--resume`` to continue; the result is bit-identical to
    a run without the interruption.

    A running validation and an open gradient-accumulation cycle are completed first: the ranks end
    after the next step. A validation that follows the step runs at the resume. A request before the
    first step ends them without a checkpoint. A request in the last step changes nothing, since the
    run is complete.

    Hooks' ``after_run`` is called, where they clean up. Their ``after_train`` is not called, since
    the training is not complete.

    ``MapSageRunner`` registers it.
    """

    # Run after all other hooks, so that the checkpoint contains everything they did in this step.
    priority = 'LOWEST'

    def __init__(self) -> None:
        self._channel: Channel = SerialChannel()

    def before_train(self, runner: HostRunner) -> None:
        """End the ranks if one of them was asked to stop while they started. Collective."""
        self._channel = open_channel(purpose='stop')
        if self._any_rank_asked():
            self._leave(runner, 'before the first step of this start, with nothing to save')

    def after_train_iter(
        self,
        runner: MapSageRun,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Dict[str, Any]] = None,
    ) -> None:
        """Save and end the ranks if one of them was asked to. Collective after optimizer steps.

        Raises:
            StoppedEarly: On every rank.
            RankError: On every rank but the main process, if the main process cannot save.
        """
        if inside_cycle(runner.optim_wrapper) or runner.iter + 1 >= runner.max_iters:
            return
        if self._any_rank_asked():
            path = self._save(runner)
            self._leave(
                runner,
                f'after iteration {runner.iter + 1}: {path} is saved; rerun the '
                f'same command with --resume to continue',
            )

    def _any_rank_asked(self) -> bool:
        """Return whether any rank was asked to stop. Collective."""
        flag = torch.tensor([bool(asked())], dtype=torch.int64)
        self._channel.max(flag)
        return bool(flag.item())

    def _save(self, runner: MapSageRun) -> str:
        """Save on the main process and return the path; the others wait. Collective."""
        # The settings of the run's CheckpointHook apply to this checkpoint too.
        settings: Dict[str, Any] = {}
        folder = runner.work_dir
        for hook in hooks_of_type(runner, CheckpointHook)[:1]:
            folder = hook.out_dir or folder
            settings = dict(file_client_args=hook.file_client_args, backend_args=hook.backend_args)
        path = os.path.join(folder, CHECKPOINT)
        with runner.saving_together(), all_ranks_or_none('saving a checkpoint before the end'):
            if is_main_process():
                runner.save_checkpoint(
                    folder,
                    CHECKPOINT,
                    by_epoch=False,
                    save_param_scheduler=runner.param_schedulers is not None,
                    **settings,
                )
                check_writer()
                atomic_write(
                    os.path.join(runner.work_dir, 'last_checkpoint'), path.encode(), durable=True
                )
        return path

    def _leave(self, runner: HostRunner, where: str) -> None:
        signal_name = asked()
        runner.logger.warning(
            f'the run was asked to stop ({signal_name or "another rank got a signal"}) and ends '
            f'{where} (status {STATUS})'
        )
        try:
            runner.call_hook('after_run')
            runner.visualizer.close()
        except Exception as error:  # users' hooks and services; everything is saved already
            runner.logger.warning(f'while the run ends: {error_text(error)}')
        # When the first rank ends, srun may kill the others. So all ranks leave together.
        self._channel.max(torch.ones(1, dtype=torch.int64))
        raise leave()


__all__ = ['CHECKPOINT', 'StopHook', 'StoppedEarly']
