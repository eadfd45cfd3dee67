"""Types of a Runner for the hooks and the engine, which cannot import MapSageRunner.

Hooks stand below the engine, and MMEngine carries no types, so mypy reads MMEngine's own `Runner`
as Any. ``HostRunner`` lists what MapSage uses of that class. MapSage's hooks also work under
MMEngine's Runner: check ``isinstance(runner, MapSageRun)`` before using what only MapSageRunner
has, which is in ``engine/runner.py``.

The class of MapSage's loader is in ``engine/loading``, which hooks cannot import since it stands
above them. Its samples can be loaded again by index and seed, and hooks set what is done with each
loaded sample. A loader that a user built has no such samples.

A hook that changes where batches come from puts a stage between loop and loader. MMEngine's loops
differ: an iteration-based loop holds one endless iterator, an epoch-based loop iterates its loader
once per epoch. A stage gives one function for each of the two.

Metrics are MMEngine's, MapSage's or a user's, so a matrix is asked for by its name.

``runner.optim_wrapper`` is an ``OptimWrapper``, an ``OptimWrapperDict`` of several, or still their
config before a training.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Protocol,
    Tuple,
    Type,
    TypeVar,
    Union,
)

import numpy as np
import torch
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.logging import MessageHub, MMLogger
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import BaseLoop
from mmengine.visualization import Visualizer
from mmseg.evaluation import IoUMetric
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


class KeyedSamples(Protocol):
    """The samples of MapSage's training loader: what its workers read, see ``KeyedDataset``.

    Attributes:
        dataset: Dataset of the config.
        finish: Function called with ``(index, seed, sample)`` for each loaded sample; its result
            replaces the sample.
        reseed: Function called with ``(index, seed)`` before a sample is loaded; returns its seed.
        keep_keys: Whether ``(index, seed)`` is written into each sample's metainfo.
        show_keys: The same for samples that have metainfo, for display.
        narrow: Whether label maps travel as uint8, which the model's preprocessor must expect.
        loader_name: Name of the loader in messages, such as ``'train_dataloader'``.
    """

    dataset: Any
    finish: Optional[Callable[[int, Tuple[int, ...], Any], Any]]
    reseed: Optional[Callable[[int, Tuple[int, ...]], Tuple[int, ...]]]
    keep_keys: bool
    show_keys: bool
    narrow: bool
    loader_name: str

    def __len__(self) -> int:
        """Return the number of samples."""

    def load(self, index: int, seed: Tuple[int, ...]) -> Any:
        """Return the sample at ``index``, drawn with ``seed``."""


def keyed_samples(loader: Any) -> Optional[KeyedSamples]:
    """Return the samples of a loader that MapSage built.

    Returns:
        The samples; None for a loader that a user built or that reads an IterableDataset.
    """
    return getattr(loader, 'samples', None)


class LoopStage(NamedTuple):
    """What a hook puts between a loop and its loader.

    Attributes:
        wrap_iterator: Takes the iterator of an iteration-based loop, and the number of items that
            the loop discards before it trains; returns the iterator to use instead. Discarded items
            may be None.
        wrap_loader: Takes the loader of an epoch-based loop and returns what the loop iterates
            instead.
    """

    wrap_iterator: Callable[[Iterator[Any], int], Iterator[Any]]
    wrap_loader: Callable[[Any], Any]


def insert_stage(loop: Any, stage: LoopStage) -> None:
    """Put a stage between a training loop and its loader.

    Later stages are nearer to the loop: a stage sees the batches of the stages inserted before it.

    Args:
        loop: Training loop of MMEngine, or of a user, before it runs.
        stage: Stage to insert.
    """
    if hasattr(loop, 'dataloader_iterator'):
        # A resumed loop of mmengine 0.10.7 discards items, see mapsage/compat/loop_resume.py.
        discarded = getattr(loop, 'num_discarded', 0)
        loop.dataloader_iterator = stage.wrap_iterator(loop.dataloader_iterator, discarded)
    else:
        loop.dataloader = stage.wrap_loader(loop.dataloader)


def metrics_of(loop: object) -> List[BaseMetric]:
    """Return the metrics of a loop; empty for a user's loop without an evaluator."""
    metrics = getattr(getattr(loop, 'evaluator', None), 'metrics', ())
    return [metric for metric in metrics if isinstance(metric, BaseMetric)]


def confusion_matrix(metric: object) -> Optional[np.ndarray]:
    """Return the confusion matrix that a metric has counted, (C, C); None without one.

    Any metric may have a matrix, not only MapSage's. Rows are the truth.
    """
    return getattr(metric, 'matrix', None)


def score_names(metric: Any) -> Optional[List[str]]:
    """Return the names that a metric will give its scores, or None if only an evaluation tells.

    MapSage's metrics have a method ``score_names``. The options of ``IoUMetric`` name its scores,
    see ``IoUMetric.total_area_to_metrics``.
    """
    if type(metric) is IoUMetric:
        further = dict(
            mIoU=['mIoU', 'mAcc'],
            mDice=['mDice', 'mAcc'],
            mFscore=['mFscore', 'mPrecision', 'mRecall'],
        )
        names = ['aAcc', *(name for option in metric.metrics for name in further.get(option, ()))]
        names = [] if metric.format_only else names
    # A subclass may give other scores than the class that names them.
    elif 'score_names' in vars(type(metric)):
        names = metric.score_names()
    else:
        return None
    return [f'{metric.prefix}/{name}' if metric.prefix else name for name in names]


def built_wrappers(optim_wrapper: Union[OptimWrappers, dict, None]) -> List[OptimWrapper]:
    """Return the wrapper of each optimizer; none before they are built."""
    wrappers = (
        optim_wrapper.values() if isinstance(optim_wrapper, OptimWrapperDict) else [optim_wrapper]
    )
    return [wrapper for wrapper in wrappers if isinstance(wrapper, OptimWrapper)]


def enabled_scaler(wrapper: OptimWrapper) -> Optional[Any]:
    """Return the wrapper's enabled loss scaler, or None.

    Only wrappers for mixed precision have one: torch's GradScaler, or an accelerator's.
    """
    scaler = getattr(wrapper, 'loss_scaler', None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def cast_dtype(wrapper: object) -> Optional[torch.dtype]:
    """Return the dtype of mixed precision.

    None without mixed precision, and for several optimizers.
    """
    # Only wrappers for mixed precision have one.
    return getattr(wrapper, 'cast_dtype', None)


def inside_cycle(optim_wrapper: Union[OptimWrappers, dict, None]) -> bool:
    """Return whether an accumulation cycle is open: the last iteration did not update all weights."""
    return any(not wrapper.should_update() for wrapper in built_wrappers(optim_wrapper))
