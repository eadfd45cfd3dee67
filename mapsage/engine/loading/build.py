"""Builds the loaders of a run, with an order that follows from the seed and checked datasets.

MMEngine's ``Runner.build_dataloader`` does the building. MapSage wraps the sampler before it
(:class:`~.data_order.ResumableSampler`) and takes over the loader after it
(:class:`~.keyed_loader.KeyedLoader`). MMEngine deep-copies a loader's config, so nothing can be
built before that call: :func:`checked_dataset` is passed as a dataset type and runs inside it.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple, Union

from mmengine.device import get_device, is_cuda_available
from mmengine.dist import get_dist_info
from mmengine.logging import print_log
from mmengine.registry import DATA_SAMPLERS, DATASETS
from mmengine.runner import BaseLoop, Runner
from torch.utils.data import DataLoader, IterableDataset

from mapsage.datasets import GeoTiffDataset
from mapsage.datasets.geotiff.summary import summarize
from mapsage.host.dataset_parts import inner_datasets
from mapsage.host.runner import dataset_of

from .data_checks import build_checked, check_labels, explain_error
from .data_order import ResumableSampler
from .keyed_loader import KeyedLoader
from .label_census import notes_on_labels
from .loader_workers import drop_worker_settings

# A loop of the Runner: built, as a config, or missing.
Loop = Union[BaseLoop, Dict[str, Any], None]


def build_loader(
    dataloader: Union[DataLoader, Dict[str, Any]], seed: Optional[int], diff_rank_seed: bool = False
) -> DataLoader:
    """Build a loader of a run from its config; a loader that is built already is returned.

    The dataset is checked for missing files, every sample for labels outside the classes.

    Raises:
        DataError: Naming the file.
    """
    if isinstance(dataloader, DataLoader):
        return dataloader
    config = dict(dataloader)
    if isinstance(config.get('dataset'), dict):
        config['dataset'] = dict(type=checked_dataset, config=config['dataset'])
    return build_keyed_loader(config, seed, diff_rank_seed)


def build_keyed_loader(
    config: Dict[str, Any], seed: Optional[int], diff_rank_seed: bool = False
) -> DataLoader:
    """Build a loader whose order and augmentation follow from the seed, see KeyedLoader.

    If the machine has a GPU, PyTorch pins memory through CUDA, even if the run computes on another
    device. Such a loader therefore pins memory only if the run computes on the GPU, and does so
    there unless the config says otherwise: the host does not wait for copies from pinned memory.

    Settings of workers are dropped from the config of a loader without workers, with a warning.
    """
    drop_worker_settings(config)
    if is_cuda_available():
        config['pin_memory'] = get_device() == 'cuda' and config.get('pin_memory', True)
    if isinstance(config.get('sampler'), dict):
        batches = config.get('batch_sampler')
        drop_last = (batches if isinstance(batches, dict) else config).get('drop_last', False)
        config['sampler'] = dict(
            type=_resumable_sampler,
            config=config['sampler'],
            run_seed=seed or 0,
            batch_size=config.get('batch_size', 1) or 1,
            drop_last=drop_last,
        )
    loader = Runner.build_dataloader(config, seed, diff_rank_seed)
    if isinstance(loader.dataset, IterableDataset):
        return loader
    return KeyedLoader(loader, check_labels, explain_error)


def set_test_mode(loop: Loop) -> Loop:
    """Set ``test_mode`` of the scenes that a loop reads, also inside wrappers; return the loop.

    A loop that is not built yet, or that reads no scenes, is returned as it is.
    """
    score_once(dataset_of(loop))
    return loop


def score_once(dataset: object) -> None:
    """Have every pixel of a dataset's scenes labeled in exactly one window, also inside wrappers.

    Overlapping windows would otherwise count a pixel several times in a score.
    """
    for scenes in datasets_of_scenes(dataset):
        scenes.score_once()


def notes_on_scenes(dataset: object) -> List[Tuple[int, str]]:
    """Return a summary of a dataset's scenes or masks, and warnings: a logging level and a text.

    A dataset of another kind may have its own in a method ``start_notes``.
    """
    inside = inner_datasets(dataset)
    return (
        [note for scenes in datasets_of_scenes(dataset) for note in summarize(scenes)]
        + [note for candidate in inside for note in getattr(candidate, 'start_notes', list)()]
        + [note for candidate in inside for note in notes_on_labels(candidate)]
    )


def datasets_of_scenes(dataset: object) -> List[GeoTiffDataset]:
    """Return the datasets of scenes inside of any wrappers."""
    inside = inner_datasets(dataset)
    return [candidate for candidate in inside if isinstance(candidate, GeoTiffDataset)]


# MMEngine's registries accept functions as types.
def checked_dataset(config: Dict[str, Any]) -> Any:
    """Build a dataset and check it, see :func:`build_checked`; rank 0 logs a summary of its scenes.

    It is a type for MMEngine's registry.
    """
    dataset = build_checked(build_dataset, config)
    if get_dist_info()[0] == 0:
        for level, text in notes_on_scenes(dataset):
            print_log(text, logger='current', level=level)
    return dataset


def build_dataset(config: Dict[str, Any]) -> Any:
    """Build a dataset with its samples listed."""
    dataset = DATASETS.build(config)
    if hasattr(dataset, 'full_init'):
        dataset.full_init()
    return dataset


def _resumable_sampler(
    config: Dict[str, Any],
    dataset: Any,
    seed: Optional[int],
    run_seed: int,
    batch_size: int,
    drop_last: bool,
) -> ResumableSampler:
    # With seed=None the sampler would draw a new seed at every start, also of a resumed run.
    if config.get('seed', seed) is None:
        config = {name: value for name, value in config.items() if name != 'seed'}
    sampler = DATA_SAMPLERS.build(config, default_args=dict(dataset=dataset, seed=seed))
    rank, world_size = get_dist_info()
    return ResumableSampler(sampler, run_seed, rank, world_size, batch_size, drop_last)
