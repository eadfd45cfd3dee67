"""Types of a Runner for the hooks and the engine, which cannot import MapSageRunner.

Hooks stand below the engine, and MMEngine carries no types, so mypy reads MMEngine's own `Runner`
as Any. ``HostRunner`` lists what MapSage uses of that class. MapSage's hooks also work under
MMEngine's Runner: check ``isinstance(runner, MapSageRun)`` before using what only MapSageRunner
has, which is in ``engine/runner.py``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import (
    TYPE_CHECKING,
    Any,
    ContextManager,
    Dict,
    List,
    Optional,
    Protocol,
    Type,
    TypeVar,
    Union,
)

from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.logging import MessageHub, MMLogger
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import BaseLoop
from mmengine.visualization import Visualizer
from torch import nn
from torch.utils.data import DataLoader, Dataset

from mapsage.accelerator import Accelerator
from mapsage.distributed import Strategy
from mapsage.distributed.virtual_ranks import VirtualRanks

# ``optim_wrapper`` and ``param_schedulers`` hold their configs until a training builds them.
OptimWrappers = Union[OptimWrapper, OptimWrapperDict]
Kind = TypeVar('Kind')


class HostRunner(Protocol):
    """Members of MMEngine's Runner that MapSage uses.

    Attributes:
        cfg: Config of the run.
        model: Model as it is wrapped for the run; :func:`plain_model` returns the model inside.
        optim_wrapper: Optimizers; their config before a training, and None in a test.
        param_schedulers: Schedulers, or a dict of lists by optimizer; their configs before a
            training, and None without any.
        work_dir: Folder of the run, the same for all starts of a run.
        logger: Logger of the run.
        message_hub: Store of scalars and run information.
        visualizer: Visualizer with its backends, such as TensorBoard.
        distributed: Whether torch.distributed is in use.
        rank: Rank of this process.
        world_size: Number of processes.
    """

    cfg: Config
    model: nn.Module
    optim_wrapper: OptimWrappers
    param_schedulers: Any
    work_dir: str
    logger: MMLogger
    message_hub: MessageHub
    visualizer: Visualizer

    # State that MMEngine keeps behind names with an underscore and offers in no other way.
    _train_loop: Union[BaseLoop, Dict[str, Any], None]
    _val_loop: Union[BaseLoop, Dict[str, Any], None]
    _test_loop: Union[BaseLoop, Dict[str, Any], None]
    _resume: Union[bool, str]
    _load_from: Optional[str]
    _log_dir: str
    _hooks: List[Hook]

    @property
    def distributed(self) -> bool:
        """Whether torch.distributed is in use."""

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    @property
    def experiment_name(self) -> str:
        """Name of the experiment, by default the config's name and the time of the start."""

    @property
    def seed(self) -> int:
        """Seed of the run."""

    @property
    def hooks(self) -> List[Hook]:
        """Registered hooks in the order in which they run."""

    @property
    def iter(self) -> int:
        """Number of finished training iterations; during one, its index."""

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""

    @property
    def max_iters(self) -> int:
        """Number of iterations of the training."""

    @property
    def max_epochs(self) -> int:
        """Number of epochs of the training; 1 if it is counted in iterations."""

    # The next six build what is not built yet.
    @property
    def train_loop(self) -> BaseLoop:
        """Training loop, built on the first use."""

    @property
    def val_loop(self) -> Optional[BaseLoop]:
        """Validation loop, built on the first use; None if the config has no validation."""

    @property
    def test_loop(self) -> Optional[BaseLoop]:
        """Test loop, built on the first use; None if the config has no test."""

    @property
    def train_dataloader(self) -> DataLoader:
        """Loader of the training loop."""

    @property
    def val_dataloader(self) -> DataLoader:
        """Loader of the validation loop."""

    @property
    def test_dataloader(self) -> DataLoader:
        """Loader of the test loop."""

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call a method of all hooks."""

    def save_checkpoint(self, out_dir: str, filename: str, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint on the main process."""


# MapSageRunner inherits the members of HostRunner from MMEngine's class. The base is for mypy only,
# because in Python 3.8 a Protocol among the bases replaces the `__init__` of a class.
if TYPE_CHECKING:
    _Host = HostRunner
else:
    _Host = object


class MapSageRun(_Host):
    """Members that MapSageRunner has in addition to those of MMEngine's Runner.

    Attributes:
        accelerator: Accelerator in force.
        local_rank: Rank of this process on its node; 0 without a launcher.
        strategy: Distribution of the run over processes and devices.
        virtual_ranks: Virtual ranks of the run; known once the model is wrapped.
        save_timeout: Longest wait for a disk, in seconds.
        fast: Whether the run has the fast settings of a card; known once the model is wrapped.
    """

    accelerator: Accelerator
    local_rank: int
    strategy: Strategy
    virtual_ranks: VirtualRanks
    save_timeout: float
    fast: bool = False

    @abstractmethod
    def copy_checkpoint(self, path: str) -> None:
        """Let extensions copy a checkpoint of ``CheckpointHook(neighbor_copy=True)``."""

    @abstractmethod
    def can_replay(self) -> bool:
        """Return whether ``tools/train.py --replay`` could carry out a step of this run."""

    @abstractmethod
    def saving_together(self, background: bool = False) -> ContextManager[Any]:
        """Let every rank take part in the checkpoint that the block saves. Collective."""

    @abstractmethod
    def finish_saves(self) -> None:
        """Wait until all checkpoints are on the disk."""

    @abstractmethod
    def refuse_training(self) -> None:
        """Raise the error that rules out a training, if there is one."""


def plain_model(runner: HostRunner) -> nn.Module:
    """Return the model of a run without the wrapper for devices or ranks."""
    return unwrap(runner.model)


def unwrap(model: nn.Module) -> nn.Module:
    """Return a model without MMEngine's wrapper, if it has one."""
    inner: Any = model.module if is_model_wrapper(model) else model
    return inner


def dataset_of(loop: object) -> Optional[Dataset]:
    """Return the dataset that a loop reads; None for the config of a loop, or a user's loop
    without a loader."""
    return getattr(getattr(loop, 'dataloader', None), 'dataset', None)


def hooks_of_type(runner: HostRunner, kind: Type[Kind]) -> List[Kind]:
    """Return the registered hooks that are instances of a class, in the order in which they run."""
    return [hook for hook in runner.hooks if isinstance(hook, kind)]
