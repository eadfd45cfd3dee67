"""End a training that was asked to by a signal, behind a checkpoint from which it can go on."""
from __future__ import annotations

import os
from typing import Any, Dict, Optional

import torch
from mmengine.dist import is_main_process
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop, Runner

from mapsage.atomic_write import atomic_write
from mapsage.distributed import (
    Channel,
    SerialChannel,
    all_ranks_or_none,
    error_text,
    open_channel,
)
from mapsage.distributed.nodes.writer_lease import check_writer
from mapsage.hooks.gradients.accumulated_gradients_hook import inside_cycle
from mapsage_launcher.stop_request import STATUS, StoppedEarly, asked, leave

# One name for all of them: a run that is stopped again and again keeps one such file.
CHECKPOINT = 'stopped.pth'


@HOOKS.register_module()
class StopHook(Hook):
    """Hook that saves a checkpoint and ends all ranks after SIGTERM or SIGUSR1 to any of them.

    At the end of every optimizer step the ranks agree, by one maximum of one number, whether any of
    them has been asked. If so, ``stopped.pth`` is saved with everything that a resume needs,
    ``last_checkpoint`` names it, and all ranks raise :class:`StoppedEarly`, a SystemExit with
    status 85. The same command with ``--resume`` goes on, with the bits of a run that was not
    stopped.

    A validation that is due or under way is finished first, and so is an accumulation cycle: the
    ranks end with the next step behind it. A request before the first step ends them without a
    checkpoint; one in the last step changes nothing, since the run is complete.

    ``after_run`` of the hooks is called, where they clean up; ``after_train`` is not, which says
    that the training is complete.

    ``MapSageRunner`` registers it.
    """

    priority = 'LOWEST'  # all that belongs to the step is done then

    def __init__(self) -> None:
        self._channel: Channel = SerialChannel()

    def before_train(self, runner: Runner) -> None:
        """End the ranks if one of them was asked to while they started. Collective."""
        self._channel = open_channel(purpose='stop')
        if self._agree():
            self._leave(runner, 'before the first step of this start, with nothing to save')

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None,
                         outputs: Optional[Dict[str, Any]] = None) -> None:
        """Save and end the ranks if one of them was asked to. Collective after optimizer steps.

        Raises:
            StoppedEarly: On every rank.
            RankError: On every rank but the main process, if that cannot save.
        """
        if (inside_cycle(runner.optim_wrapper) or runner.iter + 1 >= runner.max_iters
                or _validation_follows(runner)):
            return
        if self._agree():
            path = self._save(runner)
            self._leave(runner, f'after iteration {runner.iter + 1}: {path} is saved, and the same '
                                f'command with --resume goes on')

    def _agree(self) -> bool:
        """Return whether any rank was asked. Collective."""
        flag = torch.tensor([bool(asked())], dtype=torch.int64)
        self._channel.max(flag)
        return bool(flag.item())

    def _save(self, runner: Any) -> str:
        """Save on the main process and return the path; the others wait. Collective."""
        keeper: Any = next((each for each in runner.hooks if isinstance(each, CheckpointHook)),
                           None)
        folder = getattr(keeper, 'out_dir', None) or runner.work_dir
        path = os.path.join(folder, CHECKPOINT)
        with runner.saving_together(), all_ranks_or_none('saving a checkpoint before the end'):
            if is_main_process():
                runner.save_checkpoint(
                    folder, CHECKPOINT, getattr(keeper, 'file_client_args', None), by_epoch=False,
                    save_param_scheduler=runner.param_schedulers is not None,
                    backend_args=getattr(keeper, 'backend_args', None))
                check_writer()
                atomic_write(os.path.join(runner.work_dir, 'last_checkpoint'), path.encode(),
                             durable=True)
        return path

    def _leave(self, runner: Runner, where: str) -> None:
        why = asked()
        runner.logger.warning(
            f"the run was asked to stop ({why or 'another rank got a signal'}) and ends {where} "
            f'(status {STATUS})')
        try:
            runner.call_hook('after_run')
            runner.visualizer.close()
        except Exception as error:  # a service that got the signal too; everything is saved
            runner.logger.warning(f'while the run ends: {error_text(error)}')
        # srun may kill those that are still at it when the first one has ended.
        self._channel.max(torch.ones(1, dtype=torch.int64))
        raise leave()


def _validation_follows(runner: Runner) -> bool:
    """Return whether the loop validates behind this step, as IterBasedTrainLoop.run decides it.

    A run that is resumed would not make up for it. One by epochs does.
    """
    loop, done = runner.train_loop, runner.iter + 1
    return (isinstance(loop, IterBasedTrainLoop) and runner.val_loop is not None
            and done >= loop.val_begin and done % loop.val_interval == 0)


__all__ = ['CHECKPOINT', 'StopHook', 'StoppedEarly']
