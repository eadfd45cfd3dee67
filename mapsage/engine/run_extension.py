"""The extension point of MapSageRunner.

A feature of the runner, such as virtual ranks or a resume, is a :class:`RunExtension`. Like
a hook, it overrides the methods for those moments of a run at which it has something to do; unlike
a hook, it also acts before and while the runner builds its model and loops. The runner calls each
method of all extensions, in the order of ``extensions/__init__.py``, and knows no feature by name.
What features have to know about each other is in the attributes of :class:`EngineRun`.
"""

from __future__ import annotations

from contextlib import contextmanager
from enum import Enum
from typing import Any, Dict, Iterator, List, Optional, Union

from mmengine.config import Config
from mmengine.runner import BaseLoop
from torch import nn
from torch.utils.data import DataLoader

from mapsage.host.runner import MapSageRun

from .checkpoints.resume import Choice
from .env_cfg import EnvCfg


class Phase(Enum):
    """Phases of a run that have a loop."""

    TRAINING = 'training'
    VALIDATION = 'validation'
    TEST = 'test'


class EngineRun(MapSageRun):
    """MapSageRunner as the parts of the engine see it.

    Attributes:
        env: Parsed ``env_cfg``.
        extensions: Features of the run, in the order of their effects.
        launcher: Launcher of the process: ``'none'``, ``'pytorch'``, ``'slurm'`` or ``'mpi'``.
        resume_choice: Checkpoint that the run resumes from; None before it is chosen.
        computes_sync_bn: Whether the model has SyncBN layers, and the accelerator supports them.
    """

    env: EnvCfg
    extensions: List[RunExtension]
    launcher: str
    resume_choice: Optional[Choice] = None
    computes_sync_bn: bool = False

    # Private attributes of MMEngine's Runner that extensions read.
    _train_dataloader: Union[DataLoader, Dict[str, Any]]
    _randomness_cfg: Dict[str, Any]
    _world_size: int

    def rule_out_training(self, error: Optional[Exception]) -> None:
        """Remember an error that :meth:`train` shall raise; the first error counts.

        The runner is built all the same, because a test may still work.

        Args:
            error: Reason why a training cannot work; None if there is no reason.
        """

    def set_randomness(
        self, seed: Optional[int], diff_rank_seed: bool = False, deterministic: bool = False
    ) -> None:
        """Seed the run."""

    def register_hook(self, hook: Any, priority: Any = None) -> None:
        """Register a hook, or the config of one."""


class RunExtension:
    """One feature of MapSageRunner; each method is a moment of a run and does nothing by default.

    The runner makes one instance per run, so an extension may keep state between its moments.

    Attributes:
        acts_first: Whether an extension of an extra acts before those of the core; else after them.
    """

    acts_first = False

    @classmethod
    def take_process(cls, cfg: Config) -> Optional[Any]:
        """Return what this process runs in place of a Runner, or None. Called before ranks meet.

        Args:
            cfg: Config of the run.

        Returns:
            An object with the methods ``train``, ``val`` and ``test``.
        """
        return None

    def join(self, run: EngineRun) -> None:
        """Act when the ranks have met. There is no logger and no model yet. Collective."""

    def startup_warning(self, run: EngineRun) -> Optional[str]:
        """Return a warning for the beginning of the log, or None."""
        return None

    def prepare_model(self, run: EngineRun, model: nn.Module) -> None:
        """Change the model in place before it is wrapped."""

    def wrap_model(self, run: EngineRun, model: nn.Module) -> Optional[nn.Module]:
        """Return the model in a wrapper that the feature needs in a job of several ranks, or None."""
        return None

    def needs_one_rank_each(self, cfg: Config) -> str:
        """Return the setting that needs one process for each virtual rank, and why; else ''."""
        return ''

    def cross_check_obstacle(self, cfg: Config) -> str:
        """Return why another rank cannot repeat a step of this config; '' if it can.

        A hook that changes the step declares the same in an attribute of this name.
        """
        return ''

    @classmethod
    def prepare_replay(cls, cfg: Config) -> None:
        """Change the config of a run in place so that one process can repeat a step of it."""

    def hook_configs(self, run: EngineRun) -> List[Dict[str, Any]]:
        """Return the configs of hooks that the feature needs."""
        return []

    @contextmanager
    def building_train_loop(
        self, run: EngineRun, loop: Union[BaseLoop, Dict[str, Any]]
    ) -> Iterator[None]:
        """Surround the building of the training loop, or its use if the user built it already.

        Args:
            run: The run.
            loop: Config of the loop, or the loop that the user built.
        """
        yield

    def on_loop_built(self, run: EngineRun, phase: Phase, loop: BaseLoop) -> None:
        """Check or change a loop that has just been built.

        Args:
            run: The run.
            phase: Phase of the run to which the loop belongs.
            loop: The loop.
        """

    def choose_checkpoint(self, run: EngineRun) -> Optional[Choice]:
        """Return the checkpoint that a run resumes from, the same on all ranks. Collective.

        None leaves the choice to rank 0, which looks in the work dir. Not called if ``load_from``
        names the checkpoint.
        """
        return None

    def fixes_layout(self, cfg: Config) -> bool:
        """Return whether other processes lay out the weights of the model by the config alone."""
        return False

    def copy_checkpoint(self, run: EngineRun, path: str) -> None:
        """Copy a checkpoint of ``CheckpointHook(neighbor_copy=True)`` that is on the disk.

        Called on rank 0, also in the thread that writes checkpoints. Must not raise or wait.

        Args:
            run: The run.
            path: Path of the checkpoint.
        """

    @contextmanager
    def training(self, run: EngineRun) -> Iterator[None]:
        """Surround the training. Nothing of it is built yet when the context is entered."""
        yield

    @contextmanager
    def resuming(self, run: EngineRun) -> Iterator[None]:
        """Surround the reading of the checkpoint that the run resumes from.

        Not called in a run that does not resume.
        """
        yield

    def after_load(self, run: EngineRun) -> None:
        """Act when the weights are initialized and a checkpoint, if any, is loaded. Collective."""
