"""The Runner whose checkpoints include the state of every rank and safely replace older files.

:class:`SavingRunner` is MMEngine's Runner plus three guarantees. All ranks take part in a save, so
that hooks can collect their ranks' state. A checkpoint gets its name only once it is on the disk
(`files.py`), usually while the training continues (`background.py`). And a checkpoint that does not
fit the model is an error. The hook that saves is in `checkpoint_hook.py`; MapSageRunner in
`engine/runner.py` builds on this class.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections import OrderedDict
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from mmengine.dist import is_main_process, master_only
from mmengine.hooks import CheckpointHook, Hook
from mmengine.logging import MMLogger
from mmengine.runner import Runner
from mmengine.runner import runner as host
from torch import nn

from mapsage.base.console import make_lenient
from mapsage.base.errors import UserError
from mapsage.distributed import DEFAULT_TIMEOUT_SECONDS, all_ranks_or_none, error_text
from mapsage.distributed.groups.process_group import kept_when_interrupted
from mapsage.distributed.wrappers.split_model import whole_model
from mapsage.host.hook import MapSageHook, mapsage_hooks
from mapsage.models.checkpoint_fit import check_start, check_whole, plain_weights
from mapsage.models.frozen_weights import restore_left_out

from .background import BackgroundSaves, Save
from .checkpoint_hook import prepare_saves
from .files import write_checkpoint
from .host_copy import HostCopies


class SavingRunner(Runner):
    """MMEngine's Runner, whose checkpoints include what hooks keep on every rank.

    Hooks that derive from :class:`~mapsage.host.MapSageHook`, or have some of its methods, collect
    the state of other ranks before a save, and know the cause of a failure.

    Attributes:
        save_timeout: Longest wait for a disk, in seconds. The other ranks wait a little longer for
            rank 0, so that it can tell them the reason.
    """

    save_timeout: float = 0.9 * DEFAULT_TIMEOUT_SECONDS
    # Whether all ranks are inside saving_together().
    _saves_together = False
    # The save that saving_together() collects for the background, if any.
    _later: Optional[Save] = None
    # Path of the checkpoint that is being loaded, or was loaded last.
    _loading = ''
    # Pairs of a pattern and a name: MMEngine renames the weights of that checkpoint by them.
    _renamed: Sequence[Tuple[str, str]] = ()
    # Whether a checkpoint must fill the whole model.
    _loads_whole = False
    # Whether it is loaded for a test or a validation, which use no auxiliary heads.
    _evaluates = False

    @cached_property
    def _background(self) -> BackgroundSaves:
        return BackgroundSaves()

    def finish_saves(self) -> None:
        """Wait until all checkpoints are on the disk. Not collective; on rank 0 it may take long.

        CheckpointHook's files are written while the training continues. Code that reads one of
        them, or ends the process, calls this method first. The runner does so before the next save,
        before it loads a checkpoint, at the end of the training and after an error.

        Raises:
            SaveError: If a checkpoint could not be written. The error is raised once: here, or at
                the beginning of the next iteration, whichever comes first.
        """
        self._background.wait(self.save_timeout)

    def copy_checkpoint(self, path: str) -> None:
        """Copy a checkpoint of ``CheckpointHook(neighbor_copy=True)``. Never raises or waits."""

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call all hooks. The first iteration after a failed save raises the save's error."""
        if fn_name == 'before_train_iter':
            self._background.raise_error()
        elif fn_name == 'after_train':
            # In after_train, hooks publish checkpoints.
            with all_ranks_or_none('writing the last checkpoint'):
                self.finish_saves()
        elif fn_name == 'after_load_checkpoint':
            # Frozen weights are restored before EMAHook reads the checkpoint.
            restore_left_out(self.model, kwargs['checkpoint'], self._loading)
        super().call_hook(fn_name, **kwargs)
        if fn_name == 'after_load_checkpoint':
            # Hooks may exchange weights of the checkpoint, so the check follows them.
            self._check_fit(kwargs['checkpoint'])

    def load_checkpoint(self, filename: str, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        """Load a checkpoint as MMEngine does, after the pending saves of this run.

        Raises:
            FrozenWeightsError: If the checkpoint omits frozen weights that cannot be restored.
            CheckpointFitError: If its weights do not fit the model. A test, a validation and a
                resumed training need all weights; a training that begins with the checkpoint needs
                some.
        """
        self.finish_saves()
        self._loading = str(filename)
        arguments = inspect.signature(super().load_checkpoint).bind(filename, *args, **kwargs)
        arguments.apply_defaults()
        self._renamed = arguments.arguments['revise_keys']
        checkpoint = super().load_checkpoint(filename, *args, **kwargs)
        if isinstance(checkpoint.get('meta'), dict):
            # MMEngine's resume would execute this text. Only mmcv 1 wrote it.
            checkpoint['meta'].pop('config', None)
        return checkpoint

    def resume(self, *args: Any, **kwargs: Any) -> None:
        """Resume as MMEngine does, from a checkpoint that fits the whole model.

        Raises:
            CheckpointFitError: If the checkpoint does not fit the whole model.
            RuntimeError: If another state in it, of the optimizer or a hook, has a wrong form.
        """
        with self._whole_loads(evaluates=False):
            try:
                super().resume(*args, **kwargs)
            except UserError:
                raise
            except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise RuntimeError(
                    f'{self._loading} cannot be resumed: a state in it does not have the form that '
                    f'this run expects ({error_text(error)}). Resume from another checkpoint, or '
                    f'begin with its weights by load_from'
                ) from error

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

    def _check_fit(self, checkpoint: Mapping[str, Any]) -> None:
        """Check the weights of a checkpoint before MMEngine loads them into the model."""
        weights = plain_weights(checkpoint, self._loading)
        # MMEngine renames the weights only after this call.
        for pattern, name in self._renamed:
            weights = {re.sub(pattern, name, key): weight for key, weight in weights.items()}
        if self._loads_whole:
            check_whole(self.model, weights, self._loading, training=not self._evaluates)
            return
        fit = check_start(self.model, weights, self._loading)
        if fit.describe():
            self.logger.warning(
                f'{self._loading} fills {fit.fitting} of the {fit.wanted} weights of the model; '
                f'{fit.describe()}. Missing weights keep their initial values.'
            )

    def train(self) -> nn.Module:
        """Train. An error that follows from another rank's failure is replaced by that failure."""
        try:
            with kept_when_interrupted():
                return super().train()
        except Exception as error:
            for hook in mapsage_hooks(self._hooks):
                cause = self._explain_failure(hook)
                if cause is not None and type(cause) is not type(error):
                    raise cause from error
            raise
        finally:
            self._end_saves()

    def _explain_failure(self, hook: MapSageHook) -> Optional[Exception]:
        try:
            return hook.explain(self)
        except Exception as error:
            # The hook of a user may have a method of this name for another purpose. Whatever it
            # raises must not replace the error that ended the training.
            self.logger.warning(f'{hook.name_in_messages}.explain: {error_text(error)}')
            return None

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        """Build the logger. It accepts any text, and its files are in UTF-8."""
        logger = super().build_logger(*args, **kwargs)
        for handler in logger.handlers:
            if isinstance(handler, logging.FileHandler):
                make_lenient(handler.stream, encoding='utf-8')
            elif isinstance(handler, logging.StreamHandler):
                make_lenient(handler.stream)
        return logger

    @master_only
    def dump_config(self) -> None:
        """Write the config as MMEngine does, in place of a link of its name and not through it."""
        name = (
            f'{self.timestamp}.py'
            if self.cfg.filename is None
            else os.path.basename(self.cfg.filename)
        )
        path = os.path.join(self.work_dir, name)
        if os.path.islink(path):
            os.unlink(path)
        super().dump_config()

    def register_hook(
        self, hook: Union[Hook, Dict[str, Any]], priority: Union[str, int, None] = None
    ) -> None:
        """Register a hook; a CheckpointHook of any class saves as MapSage's."""
        registered = list(self._hooks)
        super().register_hook(hook, priority)
        for new_hook in self._hooks:
            if isinstance(new_hook, CheckpointHook) and not any(
                new_hook is old_hook for old_hook in registered
            ):
                prepare_saves(new_hook)

    @contextmanager
    def saving_together(self, background: bool = False) -> Iterator[Optional[Save]]:
        """Let every rank take part in the checkpoints that the block saves. Collective.

        CheckpointHook saves in such a block. :meth:`save_checkpoint` may also be called outside of
        one, by the main process only. Then no rank waits for another: the checkpoint lacks the
        state that hooks keep on the other ranks, and a warning says so.

        Args:
            background: Whether the checkpoints of the block are only copied in it, and written
                after the block while the training continues.

        Yields:
            With ``background``, the save to which the block may add operations; else None.

        Raises:
            SaveError: If the previous save has failed; RankError on the other ranks.
        """
        # In a save inside a save, the state of this iteration was already gathered.
        if self._saves_together:
            yield self._later
            return
        with all_ranks_or_none('writing the checkpoint before this one'):
            self.finish_saves()
        with whole_model(self.model):
            for hook in mapsage_hooks(self._hooks):
                hook.gather_state(self)
            self._saves_together, self._later = True, Save() if background else None
            try:
                yield self._later
                if self._later is not None and self._later.files:
                    self._background.begin(self._later)
            except BaseException:
                # The copies of this save will not be written.
                self._background.copies.release()
                raise
            finally:
                self._saves_together, self._later = False, None

    def save_checkpoint(self, out_dir: str, filename: str, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint, which gets its name once it is on the disk if ``out_dir`` is local.

        Only the main process writes, as in MMEngine, and no rank waits for another. The file exists
        when the call returns, except for the background saves of a CheckpointHook: see
        :meth:`finish_saves`.

        Raises:
            SaveError: If the disk refuses the file; earlier checkpoints are kept.
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
            for hook in mapsage_hooks(self._hooks):
                hook.check_own_state(self)
            self._save(out_dir, filename, *args, **kwargs)

    def _save(
        self,
        out_dir: str,
        filename: str,
        file_client_args: Optional[Mapping[str, Any]] = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        is_local = (
            '://' not in str(out_dir) and not file_client_args and not kwargs.get('backend_args')
        )
        copies = None if self._later is None else self._background.copies
        with _replacing_host_writer(self._write, copies) if is_local else nullcontext():
            super().save_checkpoint(out_dir, filename, file_client_args, *args, **kwargs)

    def _write(self, checkpoint: Dict[str, Any], path: str, **_: Any) -> None:
        if self._later is None:
            self._background.clear_leftovers(path)
            write_checkpoint(checkpoint, path)
        else:
            self._later.files.append((self._background.copies.copy(checkpoint), path))

    def _end_saves(self) -> None:
        """Finish the saves at the end of the training, without replacing the training's error."""
        try:
            self.finish_saves()
        except Exception as error:
            # Called in a finally block, where raising would hide the error that ended the training.
            # A failed save can raise anything that a file system, a pickled object or a hook's call
            # raises.
            self.logger.error(f'{type(error).__name__}: {error}')
        self._background.close()


@contextmanager
def _replacing_host_writer(
    write: Callable[..., None], copies: Optional[HostCopies]
) -> Iterator[None]:
    """Replace the functions by which MMEngine's Runner writes the checkpoint that it has built.

    The Runner builds and writes a checkpoint in one method, so its module's functions are replaced.

    Args:
        write: Function that receives the checkpoint and its path.
        copies: Host memory to which tensors of a device are copied; None for memory that MMEngine
            allocates.
    """
    originals = host.save_checkpoint, host.weights_to_cpu, host.apply_to
    # compat/checkpoint_contents.py has replaced save_checkpoint by a function that takes `write`.
    host.save_checkpoint = partial(originals[0], write=write)
    if copies is not None:
        host.weights_to_cpu = partial(_weights_to_host, copies)
        host.apply_to = lambda data, *_: copies.to_host(data)
    try:
        yield
    finally:
        host.save_checkpoint, host.weights_to_cpu, host.apply_to = originals


def _weights_to_host(copies: HostCopies, state_dict: OrderedDict) -> OrderedDict:
    metadata = getattr(state_dict, '_metadata', OrderedDict())
    weights: Any = copies.to_host(state_dict)
    weights._metadata = metadata
    return weights
