"""How many loader workers feed a training step, measured with the config's own loader."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any, Dict, Iterator, List, Mapping

from mmengine.config import Config
from mmengine.registry import DefaultScope
from torch.utils.data import DataLoader

from mapsage.commands.doctor.scene_copies import without_fast_copies
from mapsage.engine.loading.build import build_dataset, build_loader
from mapsage.engine.loading.data_checks import build_checked

from .bench import StepBench, Visit
from .options import Option, Variant

# Batches whose loading is timed, and seconds after which no more is loaded.
_LOADED, _LOAD_SECONDS = 5, 5.0
# Least time of a visit, in batches and in seconds, after the batches that were loaded ahead.
_LEAST_BATCHES, _VISIT_SECONDS = 4, 1.5


class TrainingData:
    """The training data of a config, without fast copies that would have to be made first.

    Args:
        cfg: Complete config whose folders of training data exist.

    Raises:
        DataError: If the dataset cannot be built.
    """

    def __init__(self, cfg: Config) -> None:
        self._scope = cfg.get('default_scope', 'mmengine')
        self._loader: Dict[str, Any] = dict(cfg.train_dataloader)
        config, self.left_out = without_fast_copies(self._loader['dataset'])
        self._seed = (cfg.get('randomness') or {}).get('seed') or 0
        with DefaultScope.overwrite_default_scope(self._scope):
            self._loader['dataset'] = build_checked(build_dataset, config)

    @property
    def workers(self) -> int:
        """Number of loader workers of the config."""
        return int(self._loader.get('num_workers') or 0)

    def batches(self, workers: int) -> Iterator[Any]:
        """Yield batches without an end, as a training's loader gives them."""
        config = {
            **self._loader,
            'num_workers': workers,
            'persistent_workers': bool(workers and self._loader.get('persistent_workers')),
        }
        if not workers:
            # Without workers, torch refuses it.
            config.pop('prefetch_factor', None)
        with DefaultScope.overwrite_default_scope(self._scope):
            loader: DataLoader = build_loader(config, self._seed)
        while True:
            yield from loader

    def load(self) -> List[Any]:
        """Return some batches, loaded in this process, and note the time of loading one.

        Sets :attr:`load_seconds`: median time of loading a batch without workers.
        """
        batches: List[Any] = []
        seconds: List[float] = []
        source = self.batches(0)
        while len(batches) < _LOADED and sum(seconds) < _LOAD_SECONDS:
            start = time.perf_counter()
            batches.append(next(source))
            seconds.append(time.perf_counter() - start)
        # The first batch opens files.
        self.load_seconds = statistics.median(seconds[1:] or seconds)
        return batches


def candidate_workers(
    configured: int, load_seconds: float, step_seconds: float, cores: int
) -> List[int]:
    """Return the numbers of workers to try besides the config's. Pure.

    Args:
        configured: Number of workers of the config.
        load_seconds: Time of loading a batch in one process.
        step_seconds: Time of a step.
        cores: Number of processor cores of this process.

    Example:
        >>> candidate_workers(2, load_seconds=.3, step_seconds=.1, cores=8)
        [0, 4, 8]
    """
    needed = math.ceil(1.25 * load_seconds / step_seconds)
    numbers = {0, min(needed, cores), min(2 * needed, cores)}
    return sorted(numbers - {configured})


def workers_option(loader: Mapping[str, Any], workers: int) -> Option:
    """Return the number of workers as an option of a config.

    Args:
        loader: ``train_dataloader`` of the config.
        workers: Number of loader workers.
    """
    changes = [('train_dataloader.num_workers', workers)]
    if not workers and loader.get('persistent_workers'):
        # torch refuses persistent workers where there are none.
        changes.append(('train_dataloader.persistent_workers', False))
    return Option(f'{workers} workers', tuple(changes))


def visit_with_workers(bench: StepBench, data: TrainingData, variant: Variant) -> Visit:
    """Train on batches from the loader, and return the time from batch to batch.

    Args:
        bench: Steps of the model.
        data: The training data.
        variant: Options of the step, with a number of workers.
    """
    workers = variant.workers or 0
    source = data.batches(workers)
    with bench.session(variant) as step:
        # This fills the queues of the workers, which would feed the first steps without loading.
        step(next(source))
        ahead = 2 * workers
        ends = [time.perf_counter()]
        while len(ends) <= ahead + _LEAST_BATCHES or (
            ends[-1] - ends[min(ahead, len(ends) - 1)] < _VISIT_SECONDS
        ):
            step(next(source))
            ends.append(time.perf_counter())
    measured = ends[ahead:]
    return Visit((measured[-1] - measured[0]) / (len(measured) - 1))
