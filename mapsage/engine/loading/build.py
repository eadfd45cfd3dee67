"""Build the loaders of a run: order and augmentation follow from the seed, mistakes are found."""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

from mmengine.device import get_device, is_cuda_available
from mmengine.dist import get_dist_info
from mmengine.logging import print_log
from mmengine.registry import DATA_SAMPLERS, DATASETS
from mmengine.runner import Runner
from torch.utils.data import DataLoader, IterableDataset

from mapsage.datasets import GeoTiffDataset
from mapsage.datasets.geotiff.summary import summarize

from .data_checks import build_checked, check_labels, explain_error
from .data_order import ResumableSampler
from .dataset_parts import innermost, parts
from .keyed_loader import KeyedLoader


def build_keyed_loader(config: Dict[str, Any], seed: Optional[int],
                       diff_rank_seed: bool = False) -> DataLoader:
    """Build a loader whose order and augmentation follow from the seed, see KeyedLoader.

    Where there is a GPU, PyTorch pins memory through CUDA, whatever device the run computes on.
    Such a loader does not pin memory unless that device is the GPU.
    """
    if config.get('pin_memory') and is_cuda_available() and get_device() != 'cuda':
        config['pin_memory'] = False
    if isinstance(config.get('sampler'), dict):
        batches = config.get('batch_sampler')
        drop_last = (batches if isinstance(batches, dict) else config).get('drop_last', False)
        config['sampler'] = dict(
            type=_resumable_sampler, config=config['sampler'], run_seed=seed or 0,
            batch_size=config.get('batch_size', 1) or 1, drop_last=drop_last)
    loader = Runner.build_dataloader(config, seed, diff_rank_seed)
    if isinstance(loader.dataset, IterableDataset):
        return loader
    return KeyedLoader.adopt(loader, check_labels, explain_error)


def set_test_mode(loop: Any) -> Any:
    """Set ``test_mode`` of the scenes that a loop reads, also inside wrappers; return the loop."""
    score_once(getattr(getattr(loop, 'dataloader', None), 'dataset', None))
    return loop


def score_once(dataset: Any) -> None:
    """Have each pixel of a dataset's scenes labeled in one window alone, also inside wrappers."""
    for each in datasets_of_scenes(dataset):
        each.score_once()


def notes_on_scenes(dataset: Any) -> List[Tuple[int, str]]:
    """Return what the scenes of a dataset hold, and warnings, as levels of logging and texts."""
    return [note for each in datasets_of_scenes(dataset) for note in summarize(each)]


def datasets_of_scenes(dataset: Any) -> List[GeoTiffDataset]:
    """Return the datasets of scenes inside of any wrappers."""
    inside = [innermost(part, 0)[0] for part in parts(dataset)]
    return [each for each in inside if isinstance(each, GeoTiffDataset)]


# MMEngine's registries take functions for types. Its build_dataloader copies a loader's config
# deeply, so what is built here must be built inside it.
def checked_dataset(config: Dict[str, Any]) -> Any:
    """Build a dataset, check it, see :func:`build_checked`, and log on rank 0 what scenes hold.

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


def _resumable_sampler(config: Dict[str, Any], dataset: Any, seed: Optional[int], run_seed: int,
                       batch_size: int, drop_last: bool) -> ResumableSampler:
    if config.get('seed', seed) is None:  # would be drawn anew at each start, also of a resumed run
        config = {name: value for name, value in config.items() if name != 'seed'}
    sampler = DATA_SAMPLERS.build(config, default_args=dict(dataset=dataset, seed=seed))
    rank, world_size = get_dist_info()
    return ResumableSampler(sampler, run_seed, rank, world_size, batch_size, drop_last)
