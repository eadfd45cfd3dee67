"""Checkpoints that lose nothing: the old file goes only once the new one is whole."""
from __future__ import annotations

import inspect
import logging
import re
from collections import OrderedDict
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Tuple

from mmengine.dist import is_main_process
from mmengine.hooks import CheckpointHook
from mmengine.logging import MMLogger
from mmengine.runner import Runner
from mmengine.runner import runner as host
from torch import nn

from mapsage.console import make_lenient
from mapsage.distributed import DEFAULT_TIMEOUT_SECONDS, all_ranks_or_none
from mapsage.distributed.groups.process_group import kept_when_interrupted
from mapsage.models.checkpoint_fit import check_start, check_whole, plain_weights
from mapsage.models.frozen_weights import restore_left_out
from mapsage.wrappers import whole_model

from .background import BackgroundSaves, Save
from .files import write_checkpoint
from .guard import guard_saves
from .host_copy import HostCopies
from .neighbor.copies import NeighborCopies


class SavingRunner(Runner):
    """MMEngine's Runner, whose checkpoints hold what hooks keep of every rank.

    Hooks may have these methods besides MMEngine's:

    - ``gather_state(runner)`` runs on all ranks before a checkpoint is saved. It may collect what
      the other ranks have, and its error prevents the save.
    - ``check_own_state(runner)`` runs in its place on the main process where that saves alone.
    - ``explain(runner)`` returns the error that is the cause of this rank's failure, or None.
    - ``end_run(runner, error)`` is called when MapSageRunner's ``train``, ``val`` or ``test`` ends.
    """

    # Longest wait for a disk, in seconds. The other ranks wait a little longer for rank 0, so that
    # it can tell them why.
    save_timeout: float = 0.9 * DEFAULT_TIMEOUT_SECONDS
    neighbor_copies: Optional[NeighborCopies] = None  # where machines share no disk
    _saves_together = False
    _loading = ''  # path of the checkpoint that was last loaded
    _renamed: Sequence[Tuple[str, str]] = ()  # patterns and names that its loading gives weights
    _loads_whole = False  # whether a checkpoint must fill the whole model
    _evaluates = False  # whether that is for a test or a validation, which use no auxiliary heads
    _later: Optional[Save] = None  # the save that is being collected, to be written later

    @cached_property
    def _background(self) -> BackgroundSaves:
        return BackgroundSaves()

    def finish_saves(self) -> None:
        """Wait until all checkpoints are on the disk. Not collective; for rank 0 it may take long.

        CheckpointHook's files are written while the training goes on. What reads one, or ends the
        process, calls this first. The runner does so before the next save, before it loads a
        checkpoint, at the end of the training and after an error.

        Raises:
            SaveError: If a checkpoint could not be written. It is raised once: also at the next
                iteration, if that comes first.
        """
        self._background.wait(self.save_timeout)

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call all hooks; the first iteration after a save has failed raises its error."""
        if fn_name == 'before_train_iter':
            self._background.raise_error()
        elif fn_name == 'after_train':  # where hooks publish checkpoints
            with all_ranks_or_none('writing the last checkpoint'):
                self.finish_saves()
        elif fn_name == 'after_load_checkpoint':  # before EMAHook reads it
            restore_left_out(self.model, kwargs['checkpoint'], self._loading)
        super().call_hook(fn_name, **kwargs)
        if fn_name == 'after_load_checkpoint':  # hooks may exchange weights in it
            self._check_fit(kwargs['checkpoint'])

    def load_checkpoint(self, filename: str, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint as MMEngine does, once those of this run are on the disk.

        Raises:
            FrozenWeightsError: If it leaves frozen weights out, and they cannot be restored.
            CheckpointFitError: If its weights are not those of the model: all of them for a test,
                a validation or a resumed training, some for a training that begins with them.
        """
        self.finish_saves()
        self._loading = str(filename)
        given = inspect.signature(super().load_checkpoint).bind(filename, *args, **kwargs)
        given.apply_defaults()
        self._renamed = given.arguments['revise_keys']
        return super().load_checkpoint(filename, *args, **kwargs)

    def resume(self, *args: Any, **kwargs: Any) -> None:
        """Resume as MMEngine does, from a checkpoint that fits the whole model.

        Raises:
            CheckpointFitError: If it does not.
        """
        with self._whole_loads(evaluates=False):
            super().resume(*args, **kwargs)

    def val(self) -> Dict[str, Any]:
        """Validate as MMEngine does; the checkpoint of ``load_from`` must fit the whole model."""
        with self._whole_loads(evaluates=True):
            return super().val()

    def test(self) -> Dict[str, Any]:
        """Test as MMEngine does; the checkpoint of ``load_from`` must fit the whole model."""
        with self._whole_loads(evaluates=True):
            return super().test()

    @contextmanager
    def _whole_loads(self, evaluates: bool) -> Iterator[None]:
        self._loads_whole, self._evaluates = True, evaluates
        try:
            yield
        finally:
            self._loads_whole, self._evaluates = False, False

    def _check_fit(self, checkpoint: Any) -> None:
        """Check the weights that are about to be loaded; the model is still as it was."""
        weights = plain_weights(checkpoint, self._loading)
        for pattern, name in self._renamed:  # MMEngine renames them after this call
            weights = {re.sub(pattern, name, key): weight for key, weight in weights.items()}
        if self._loads_whole:
            check_whole(self.model, weights, self._loading, training=not self._evaluates)
            return
        fit = check_start(self.model, weights, self._loading)
        if fit.describe():
            self.logger.warning(
                f'{self._loading} fills {fit.fitting} of the {fit.wanted} weights of the model; '
                f'{fit.describe()}. What is missing keeps its initial values.')

    def train(self) -> nn.Module:
        """Train; an error that follows from another rank's failure is replaced by that one."""
        try:
            with kept_when_interrupted():
                return super().train()
        except Exception as error:
            for hook in self._hooks:
                try:
                    cause = hook.explain(self) if hasattr(hook, 'explain') else None
                except Exception:  # such as that it is another method of a user's hook
                    cause = None
                if cause is not None and type(cause) is not type(error):
                    raise cause from error
            raise
        finally:
            self._end_saves()

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        """Build the logger; it takes any text, and its files are in UTF-8."""
        logger = super().build_logger(*args, **kwargs)
        for handler in logger.handlers:
            in_file = isinstance(handler, logging.FileHandler)
            make_lenient(getattr(handler, 'stream', None), **(
                dict(encoding='utf-8') if in_file else {}))
        return logger

    def register_hook(self, hook: Any, priority: Any = None) -> None:
        """Register a hook; a CheckpointHook is guarded, see :func:`guard_saves`."""
        before = list(self._hooks)
        super().register_hook(hook, priority)
        for each in self._hooks:
            if isinstance(each, CheckpointHook) and not any(each is other for other in before):
                guard_saves(each)

    @contextmanager
    def saving_together(self, background: bool = False) -> Iterator[Optional[Save]]:
        """Let every rank take part in the checkpoint that is saved in the block. Collective.

        CheckpointHook saves like this. A call of :meth:`save_checkpoint` outside such a block is
        legal on the main process alone, so no rank waits for another in it: what a hook keeps of
        the other ranks is missing from that checkpoint, with a warning.

        Args:
            background: Whether checkpoints in the block are copied, and written behind it while
                the training goes on.

        Yields:
            The save to which the block may add, with ``background``; else None.

        Raises:
            SaveError: If the save before this one has failed; RankError on the other ranks.
        """
        if self._saves_together:  # a save within a save: what is gathered is of this iteration
            yield self._later
            return
        with all_ranks_or_none('writing the checkpoint before this one'):
            self.finish_saves()
        with whole_model(self.model):
            for hook in self._hooks:
                if hasattr(hook, 'gather_state'):
                    hook.gather_state(self)
            self._saves_together, self._later = True, Save() if background else None
            try:
                yield self._later
                if self._later is not None and self._later.files:
                    self._background.begin(self._later)
            except BaseException:
                self._background.copies.release()  # nobody writes what was copied
                raise
            finally:
                self._saves_together, self._later = False, None

    def save_checkpoint(self, out_dir: str, filename: str, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint under its name only once it is on the disk, when ``out_dir`` is local.

        Only the main process writes, as in MMEngine, and no rank waits for another. The file is
        there when the call returns, but for those of a CheckpointHook: see :meth:`finish_saves`.

        Raises:
            SaveError: If the disk refuses it; the checkpoints before it are kept.
        """
        if not is_main_process():
            return
        if self._saves_together:
            self._save(out_dir, filename, *args, **kwargs)
        elif not self.distributed:
            with self.saving_together():
                self._save(out_dir, filename, *args, **kwargs)
        else:
            self.finish_saves()
            for hook in self._hooks:
                if hasattr(hook, 'check_own_state'):
                    hook.check_own_state(self)
            self._save(out_dir, filename, *args, **kwargs)

    def _save(self, out_dir: str, filename: str, file_client_args: Any = None, *args: Any,
              **kwargs: Any) -> None:
        ours = '://' not in str(out_dir) and not file_client_args and not kwargs.get('backend_args')
        copies = None if self._later is None else self._background.copies
        with _written_by(self._write, copies) if ours else nullcontext():
            super().save_checkpoint(out_dir, filename, file_client_args, *args, **kwargs)

    def _write(self, checkpoint: Any, path: str, **_: Any) -> None:
        if self._later is None:
            self._background.clear_leftovers(path)
            write_checkpoint(checkpoint, path)
        else:
            self._later.files.append((self._background.copies.copy(checkpoint), path))

    def _end_saves(self) -> None:
        """Finish at the end of the training, and let its own error be the one that is raised."""
        try:
            self.finish_saves()
        except Exception as error:  # whatever the disk said; what ended the training comes first
            self.logger.error(f'{type(error).__name__}: {error}')
        self._background.close()


@contextmanager
def _written_by(write: Callable[..., None], copies: Optional[HostCopies]) -> Iterator[None]:
    """Let MMEngine's Runner, which makes a checkpoint and writes it in one go, write like this.

    Args:
        write: Function that is given the checkpoint and its path.
        copies: Host memory to which the Runner brings tensors of a device, or None for its own.
    """
    before = host.save_checkpoint, host.weights_to_cpu, host.apply_to
    host.save_checkpoint = partial(before[0], write=write)  # see compat/checkpoint_contents.py
    if copies is not None:
        host.weights_to_cpu = partial(_weights_to_host, copies)
        host.apply_to = lambda data, *_: copies.to_host(data)
    try:
        yield
    finally:
        host.save_checkpoint, host.weights_to_cpu, host.apply_to = before


def _weights_to_host(copies: HostCopies, state_dict: Any) -> Any:
    metadata = getattr(state_dict, '_metadata', OrderedDict())
    weights = copies.to_host(state_dict)
    weights._metadata = metadata
    return weights
