"""Which datasets a wrapper holds, and which of their samples it gives."""
from __future__ import annotations

import bisect
from typing import Any, Iterator, List, Tuple

from mmcv.transforms import LoadAnnotations
from mmengine.dataset import ClassBalancedDataset, RepeatDataset
from mmengine.runner.runner import _SlicedDataset
from torch.utils.data import ConcatDataset, Subset

_LOADERS = ('mmcv', 'mmseg', 'mmdet', 'mapsage')  # packages whose transforms read image files


def innermost(dataset: Any, index: Any) -> Tuple[Any, Any]:
    """Return the dataset inside of wrappers that has a sample, and the sample's index there.

    Args:
        dataset: Dataset of a loader. Wrappers of MMEngine and torch are known; another wrapper is
            seen through if it has as many samples as its ``dataset``.
        index: Index of the sample. One that is no number stays with the outermost dataset.
    """
    while isinstance(index, int):
        inner = _inner(dataset)
        if isinstance(dataset, ConcatDataset):
            part = bisect.bisect_right(dataset.cumulative_sizes, index)
            index -= dataset.cumulative_sizes[part - 1] if part else 0
            dataset = dataset.datasets[part]
        elif isinstance(dataset, (RepeatDataset, ClassBalancedDataset)):
            index = dataset._get_ori_dataset_idx(index)
            dataset = dataset.dataset
        elif isinstance(dataset, Subset):
            dataset, index = dataset.dataset, int(dataset.indices[index])
        elif inner is not None:
            dataset = inner
        else:
            break
    return dataset, index


def parts(dataset: Any) -> Iterator[Any]:
    """Yield the datasets inside of wrappers that use all their samples, each once."""
    if isinstance(dataset, ConcatDataset):
        inside: List[Any] = list(dataset.datasets)
    elif isinstance(dataset, (RepeatDataset, ClassBalancedDataset)):
        inside = [dataset.dataset]
    else:
        inside = [inner for inner in [_inner(dataset)] if inner is not None]
    for each in {id(each): each for each in inside}.values():
        yield from parts(each)
    if not inside:
        yield dataset


def reads_remotely(dataset: Any) -> bool:
    """Return whether a dataset or its pipeline reads through a backend that is not the local disk.

    The paths of its samples may then be no local paths.
    """
    return _is_remote(dataset) or any(map(_is_remote, _transforms(dataset)))


def loads_masks(dataset: Any) -> bool:
    """Return whether a dataset reads masks: by a ``LoadAnnotations``, or in an unknown way."""
    return not hasattr(dataset, 'pipeline') or any(
        isinstance(transform, LoadAnnotations) for transform in _transforms(dataset))


def loads_images(dataset: Any) -> bool:
    """Return whether images are read by a transform for which ``img_path`` is a file.

    A user's own loader may take it for something else, such as a place in an archive. A dataset
    without a pipeline counts as reading files.
    """
    return not getattr(dataset, 'pipeline', None) or any(
        kind.__name__.startswith('Load') and kind.__module__.split('.')[0] in _LOADERS
        for each in _transforms(dataset) if not isinstance(each, LoadAnnotations)
        for kind in type(each).__mro__)


def _inner(dataset: Any) -> Any:
    """Return the dataset of an unknown wrapper that gives its samples one by one, else None."""
    if isinstance(dataset, _SlicedDataset):
        return dataset._dataset
    inner: Any = getattr(dataset, '__dict__', {}).get('dataset')
    known = all(hasattr(inner, name) for name in ('__getitem__', '__len__', 'get_data_info'))
    return inner if known and len(inner) == len(dataset) else None


def _is_remote(thing: Any) -> bool:
    for name in ('backend_args', 'file_client_args'):
        backend = getattr(thing, name, None) or {}
        if backend.get('backend', 'local') not in ('local', 'disk') or 'path_mapping' in backend:
            return True
    return False


def _transforms(dataset: Any) -> Iterator[Any]:
    """Yield the transforms of a pipeline, also those inside of others."""
    waiting = [getattr(dataset, 'pipeline', None)]
    seen = set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, (list, tuple)):
            waiting += each
        elif hasattr(each, '__dict__') and callable(each):
            yield each
            waiting += vars(each).values()
