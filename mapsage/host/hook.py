"""The base class of MapSage's hooks: what MapSageRunner calls beyond MMEngine's hook points.

All methods have defaults, so a hook overrides only what it needs. A hook of a user may derive from
the class, or have some of its methods without doing so. :func:`mapsage_hooks` adapts such hooks,
and is the only place that tells the two kinds apart.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Iterable, List, Optional

from mmengine.hooks import Hook

from mapsage.distributed.wrappers import VirtualDataParallel
from mapsage.distributed.wrappers.rank_batches import Batch
from mapsage.host.runner import HostRunner, MapSageRun


class MapSageHook(Hook):
    """A hook that takes part in checkpoints of all ranks, in errors and in virtual ranks.

    Attributes:
        uneven_batches: Whether the hook may give the ranks different numbers of samples in a step.
        cross_check_obstacle: Reason why another rank cannot compute a step with this hook again
            from batch, weights and random state, for the error of ``env_cfg.cross_check``; ``''``
            if it can.
    """

    uneven_batches: bool = False
    cross_check_obstacle: str = ''
    _rank_start: Optional[Callable[[int, Any], None]] = None

    @property
    def name_in_messages(self) -> str:
        """Name of the class of this hook."""
        return type(self).__name__

    def gather_state(self, runner: MapSageRun) -> None:
        """Collect what the other ranks have for a checkpoint, before it is saved.

        Runs on all ranks, so it may enter collectives. An error prevents the save.
        """

    def check_own_state(self, runner: MapSageRun) -> None:
        """Run instead of :meth:`gather_state` where the main process saves without the other ranks.

        Enters no collective. An error prevents the save.
        """

    def explain(self, runner: MapSageRun) -> Optional[Exception]:
        """Return the error that caused this rank's failure, or None if the hook knows of none."""

    def end_run(self, runner: MapSageRun, error: Optional[BaseException]) -> None:
        """Run when MapSageRunner's ``train``, ``val`` or ``test`` ends, also after an error.

        Ranks do not wait for each other here, so the method may enter no collective. An error of
        this method becomes a warning in the log.

        Args:
            runner: Runner of the run.
            error: Error that ended the run, or None.
        """

    def on_virtual_rank_start(self, runner: HostRunner, virtual_rank: int, batch: Batch) -> None:
        """Run before the forward pass of each virtual rank of this process.

        Called between :meth:`follow_virtual_ranks` and :meth:`unfollow_virtual_ranks`, and only if
        the model is wrapped in :class:`VirtualDataParallel`.

        Args:
            runner: Runner of the training.
            virtual_rank: Number of the virtual rank in the run.
            batch: Batch of this virtual rank.
        """

    def follow_virtual_ranks(self, runner: HostRunner) -> None:
        """Have :meth:`on_virtual_rank_start` called from now on; a second call changes nothing."""
        self.unfollow_virtual_ranks(runner)
        if isinstance(runner.model, VirtualDataParallel):
            self._rank_start = partial(self.on_virtual_rank_start, runner)
            runner.model.on_virtual_rank_start.append(self._rank_start)

    def unfollow_virtual_ranks(self, runner: HostRunner) -> None:
        """Have :meth:`on_virtual_rank_start` called no more."""
        callbacks = (
            runner.model.on_virtual_rank_start
            if isinstance(runner.model, VirtualDataParallel)
            else []
        )
        if self._rank_start in callbacks:
            callbacks.remove(self._rank_start)
        self._rank_start = None


class _UsersHook(MapSageHook):
    """A hook of MMEngine or of a user as a MapSageHook, with the methods that it has."""

    def __init__(self, users: Hook) -> None:
        self._users = users
        self.uneven_batches = getattr(users, 'uneven_batches', False)

    @property
    def name_in_messages(self) -> str:
        return type(self._users).__name__

    def gather_state(self, runner: MapSageRun) -> None:
        self._call('gather_state', runner)

    def check_own_state(self, runner: MapSageRun) -> None:
        self._call('check_own_state', runner)

    def explain(self, runner: MapSageRun) -> Optional[Exception]:
        return self._call('explain', runner)

    def end_run(self, runner: MapSageRun, error: Optional[BaseException]) -> None:
        self._call('end_run', runner, error)

    def _call(self, method: str, *args: Any) -> Any:
        function = getattr(self._users, method, None)
        return None if function is None else function(*args)


def mapsage_hooks(hooks: Iterable[Hook]) -> List[MapSageHook]:
    """Return hooks in their order, to call MapSage's methods on.

    Hooks that do not derive from MapSageHook are adapted: a method is called if the hook has it.
    """
    return [hook if isinstance(hook, MapSageHook) else _UsersHook(hook) for hook in hooks]
