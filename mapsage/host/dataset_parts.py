"""Looks through wrapped datasets: which datasets a wrapper contains, and how they read their files.

Users wrap datasets with classes of MMEngine, of torch and with classes written by themselves. An
unknown wrapper is looked through only if it clearly gives the samples of its ``dataset`` one by
one.
"""

from __future__ import annotations

import bisect
import pickle
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from mmcv.transforms import LoadAnnotations
from mmengine.dataset import BaseDataset, ClassBalancedDataset, RepeatDataset
from mmengine.runner.runner import _SlicedDataset
from torch.utils.data import ConcatDataset, Subset

# Packages whose loading transforms read image files.
_LOADERS = ('mmcv', 'mmseg', 'mmdet', 'mapsage')


def innermost(dataset: object, index: object) -> Tuple[Any, Any]:
    """Return the dataset inside of wrappers that has a sample, and the sample's index there.

    Args:
        dataset: Dataset of a loader. Wrappers of MMEngine and torch are known. Another wrapper is
            looked through if it has as many samples as its ``dataset``.
        index: Index of the sample. An index that is not a number stays with the outermost dataset.
    """
    inside: Any = dataset
    while isinstance(index, int):
        inner = _inner(inside)
        if isinstance(inside, ConcatDataset):
            number = bisect.bisect_right(inside.cumulative_sizes, index)
            index -= inside.cumulative_sizes[number - 1] if number else 0
            inside = inside.datasets[number]
        elif isinstance(inside, (RepeatDataset, ClassBalancedDataset)):
            index = inside._get_ori_dataset_idx(index)
            inside = inside.dataset
        elif isinstance(inside, Subset):
            inside, index = inside.dataset, int(inside.indices[index])
        elif inner is not None:
            inside = inner
        else:
            break
    return inside, index


def parts(dataset: object) -> Iterator[Any]:
    """Yield the datasets inside of wrappers that use all their samples, each once."""
    if isinstance(dataset, ConcatDataset):
        inside: List[object] = list(dataset.datasets)
    elif isinstance(dataset, (RepeatDataset, ClassBalancedDataset)):
        inside = [dataset.dataset]
    else:
        inside = [inner for inner in [_inner(dataset)] if inner is not None]
    for inner in {id(inner): inner for inner in inside}.values():
        yield from parts(inner)
    if not inside:
        yield dataset


def inner_datasets(dataset: object) -> List[Any]:
    """Return the innermost datasets of all wrappers."""
    return [innermost(part, 0)[0] for part in parts(dataset)]


def lists_samples(dataset: object) -> bool:
    """Return whether a dataset names the files of its samples, as MMEngine's datasets do.

    Other datasets of torch and of users have no ``get_data_info``.
    """
    return hasattr(dataset, 'get_data_info')


def listed_samples(dataset: Any) -> Iterator[Mapping[str, Any]]:
    """Yield what a dataset knows of each sample; nothing if it does not name its samples' files.

    The contents are for reading: they may belong to the dataset.
    """
    method = getattr(getattr(dataset, 'get_data_info', None), '__func__', None)
    if (
        method is BaseDataset.get_data_info
        and dataset.serialize_data
        and dataset._fully_initialized
    ):
        # MMEngine keeps a list of pickled samples, which its own method reads five times as slowly.
        content, start = memoryview(dataset.data_bytes), 0
        for end in dataset.data_address.tolist():
            yield pickle.loads(content[start:end])
            start = end
    elif lists_samples(dataset) and hasattr(dataset, '__len__'):
        yield from map(dataset.get_data_info, range(len(dataset)))


def metainfo_of(dataset: object) -> Dict[str, Any]:
    """Return the metainfo of a dataset, such as names of classes; {} without any."""
    # A user's dataset may have no metainfo.
    metainfo = getattr(dataset, 'metainfo', None)
    return dict(metainfo) if isinstance(metainfo, Mapping) else {}


def ignored_label(outer: object, inner: object, default: int) -> int:
    """Return the label of ignored pixels.

    Args:
        outer: Dataset of a loader, whose label wins.
        inner: Dataset inside of its wrappers.
        default: Label if neither names one; only MMSegmentation's datasets do.
    """
    return getattr(outer, 'ignore_index', getattr(inner, 'ignore_index', default))


def reads_remotely(dataset: object) -> bool:
    """Return whether a dataset or its pipeline reads through a backend other than the local disk.

    The paths of its samples may then not be local paths.
    """
    return _is_remote(dataset) or any(map(_is_remote, _transforms(dataset)))


def loads_masks(dataset: object) -> bool:
    """Return whether a dataset reads masks: by a ``LoadAnnotations``, or in an unknown way."""
    return not hasattr(dataset, 'pipeline') or any(
        isinstance(transform, LoadAnnotations) for transform in _transforms(dataset)
    )


def loads_images(dataset: object) -> bool:
    """Return whether images are read by a transform for which ``img_path`` is a file.

    A user's transform may give ``img_path`` another meaning, such as a position in an archive. A
    dataset without a pipeline counts as reading files.
    """
    return not getattr(dataset, 'pipeline', None) or any(
        kind.__name__.startswith('Load') and kind.__module__.split('.')[0] in _LOADERS
        for transform in _transforms(dataset)
        if not isinstance(transform, LoadAnnotations)
        for kind in type(transform).__mro__
    )


def _inner(dataset: object) -> Optional[Any]:
    """Return the dataset of an unknown wrapper that gives its samples one by one, else None."""
    if isinstance(dataset, _SlicedDataset):
        return dataset._dataset
    inner: Any = getattr(dataset, '__dict__', {}).get('dataset')
    is_dataset = all(hasattr(inner, name) for name in ('__getitem__', '__len__', 'get_data_info'))
    outer: Any = dataset
    return inner if is_dataset and len(inner) == len(outer) else None


def _is_remote(reader: object) -> bool:
    for name in ('backend_args', 'file_client_args'):
        backend = getattr(reader, name, None) or {}
        if backend.get('backend', 'local') not in ('local', 'disk') or 'path_mapping' in backend:
            return True
    return False


def _transforms(dataset: object) -> Iterator[object]:
    """Yield the transforms of a pipeline, including those inside of other transforms."""
    waiting: List[object] = [getattr(dataset, 'pipeline', None)]
    seen = set()
    while waiting:
        candidate = waiting.pop()
        if id(candidate) in seen:
            continue
        seen.add(id(candidate))
        if isinstance(candidate, (list, tuple)):
            waiting += candidate
        elif hasattr(candidate, '__dict__') and callable(candidate):
            yield candidate
            waiting += vars(candidate).values()
