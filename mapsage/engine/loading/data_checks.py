"""Finds mistakes in a user's dataset and names the file at fault.

Three moments are covered. When a dataset is built, it must have samples and their files must exist
(:func:`build_checked`). When a sample is loaded, its mask may contain only class indices
(:func:`check_labels`), and an error of loading is explained (:func:`explain_error`). Before a
training, the decode heads must have the dataset's classes (:func:`compare_heads`).
"""

from __future__ import annotations

import errno
import inspect
import logging
import os
import traceback
from collections import Counter, defaultdict
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Sized,
    Tuple,
    Union,
)

import cv2
import numpy as np
import torch
from mmengine.dataset import BaseDataset
from mmengine.logging import print_log
from mmseg.models.decode_heads import STDCHead
from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from mmseg.registry import DATASETS
from torch import nn

from mapsage.base.errors import UserError
from mapsage.distributed import error_text
from mapsage.host.batch_images import packed_mask
from mapsage.host.dataset_parts import (
    ignored_label,
    innermost,
    listed_samples,
    lists_samples,
    loads_images,
    loads_masks,
    metainfo_of,
    parts,
    reads_remotely,
)

# MMSegmentation's default, for a dataset that does not set ignore_index.
IGNORE_INDEX = 255

# Keys of a sample's files.
_FILE_KEYS = ('img_path', 'seg_map_path')
# Formats that OpenCV decodes completely. It refuses many valid files of other formats, such as
# TIFF.
_DECODED_SUFFIXES = ('.png', '.jpg', '.jpeg', '.bmp', '.webp')
# Most characters of a traceback in a message. The report of a rank's error has at most 4,000 bytes.
_TRACEBACK_LENGTH = 2500
# Types of labels that are checked by a table.
_INTEGERS = torch.uint8, torch.int16, torch.int32, torch.int64
_PACKAGE = f'{Path(__file__).resolve().parents[2]}{os.sep}'


class DataError(UserError, ValueError):
    """A dataset or one of its files is unusable; the message names it."""


class SampleError(UserError, RuntimeError):
    """A transform or a dataset failed on a sample; the message ends with its traceback."""


def build_checked(build: Callable[[Dict[str, Any]], Any], config: Dict[str, Any]) -> Any:
    """Build a dataset and check that it has samples and that their files exist.

    Args:
        build: Function that turns ``config`` into a fully initialized dataset.
        config: Config of the dataset.

    Raises:
        DataError: If the dataset's folder is missing or empty, if an image has no mask, or if the
            dataset refuses its files or arguments.
    """
    kind, data_root = config.get('type', 'dataset'), config.get('data_root', '')
    try:
        dataset = build(config)
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = error.filename or error
        raise DataError(
            f'{_name(kind)}: {missing} does not exist (data_root={data_root!r}). Point data_root '
            f'and data_prefix at the data, or make it first (docs/reference/datasets.md).'
        ) from error
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        looped = Path(str(error.filename))
        first = next(
            (path for path in reversed([looped, *looped.parents]) if path.is_symlink()), looped
        )
        raise DataError(
            f'{_name(kind)}: {first} is a symbolic link that leads back into its own folder '
            f'(data_root={data_root!r}); expected folders of images. Remove the link.'
        ) from error
    except ValueError as error:
        # For an empty list of samples, MMEngine's BaseDataset raises this error of NumPy's.
        if 'need at least one array to concatenate' not in str(error):
            if not _is_from_mapsage(error):
                # The error comes from the user's code, and its traceback shows the line.
                raise
            raise DataError(f'{_name(kind)}: {error}') from error
        dataset = ()
    # A stream has no length.
    if not isinstance(dataset, Sized):
        return dataset
    if len(dataset) == 0:
        raise DataError(
            f'{_name(kind)} found no samples under data_root={data_root!r}, data_prefix='
            f'{config.get("data_prefix")}: {_explain_no_samples(config)}'
        )
    check_files_exist(dataset)
    return dataset


def _explain_no_samples(config: Mapping[str, Any]) -> str:
    kind = config.get('type')
    if isinstance(kind, str):
        kind = DATASETS.get(kind)
    # The signature of __init__ is used, because Python 3.8 gives a generic class the signature of
    # its __new__: (*args, **kwds).
    build = kind.__init__ if isinstance(kind, type) else kind  # type: ignore[misc]
    default = inspect.signature(build).parameters.get('img_suffix') if callable(build) else None
    expected_suffix = config.get('img_suffix', None if default is None else default.default)
    folder = os.path.join(
        str(config.get('data_root') or ''),
        str(_section(config, 'data_prefix').get('img_path') or ''),
    )
    files = (
        Counter(os.path.splitext(path)[1] for path in os.listdir(folder))
        if isinstance(expected_suffix, str) and os.path.isdir(folder)
        else Counter()
    )
    suffix, count = next((pair for pair in files.most_common() if pair[0]), ('', 0))
    if not suffix or any(name.endswith(expected_suffix) for name in os.listdir(folder)):
        return (
            'the folder is empty, or its files do not end in the img_suffix of the dataset '
            '(LoveDA: .png).'
        )
    return (
        f'no file ends in img_suffix={expected_suffix!r}. {folder} holds {count} file(s) that '
        f'end in {suffix}: set img_suffix={suffix!r} in the dataset.'
    )


def band_order_note(cfg: Mapping[str, Any]) -> Optional[str]:
    """Return a warning if the bands of scenes would reach the model in reverse order, else None.

    The bands of a scene's file usually begin with red, and ``bgr_to_rgb`` expects blue first.

    Args:
        cfg: Config of the run.
    """
    preprocessor = _section(_section(cfg, 'model'), 'data_preprocessor')
    if not preprocessor.get('bgr_to_rgb'):
        return None
    for loader in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        dataset = _section(_section(cfg, loader), 'dataset')
        first = next(iter(dataset.get('pipeline') or ()), None)
        bands = list(dataset.get('bands') or (1, 2, 3))
        if (
            isinstance(first, Mapping)
            and first.get('type') == 'LoadGeoTiffWindow'
            and bands == sorted(bands)
        ):
            return (
                f'{loader}: LoadGeoTiffWindow gives the bands as {bands}, and bgr_to_rgb=True '
                f'of the data_preprocessor reverses them. If the files begin with red, set '
                f'bands={bands[::-1]} in the dataset, or remove bgr_to_rgb.'
            )
    return None


def _section(cfg: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a section of a config; empty if it is missing or has been built already."""
    section = cfg.get(key)
    return section if isinstance(section, Mapping) else {}


def check_files_exist(dataset: object) -> None:
    """Check that every local image and mask of a dataset exists, by listing each folder once.

    Each dataset inside of wrappers is checked once. Masks count only if the pipeline loads them, so
    that a test set without labels passes. Paths that a file backend maps are not checked.

    Raises:
        DataError: If files are missing, with the first path and the number of missing files.
    """
    for inner in parts(dataset):
        keys = _local_file_keys(inner)
        if keys and lists_samples(inner):
            _check_files(inner, keys)


def _local_file_keys(dataset: object) -> Tuple[str, ...]:
    """Return the keys of the files of a sample that are read from a local disk."""
    if reads_remotely(dataset):
        return ()
    return tuple(
        key for key, loads in zip(_FILE_KEYS, (loads_images, loads_masks)) if loads(dataset)
    )


def _check_files(dataset: Any, keys: Sequence[str]) -> None:
    # Folder -> file name -> key of the file in the sample.
    expected: Dict[str, Dict[str, str]] = defaultdict(dict)
    for info in listed_samples(dataset):
        for key in keys:
            path = info.get(key)
            if isinstance(path, str) and '://' not in path:
                folder, name = os.path.split(path)
                expected[folder].setdefault(name, key)
    missing: List[str] = []
    kinds: Set[str] = set()
    for folder, names in expected.items():
        present = set(os.listdir(folder or '.')) if os.path.isdir(folder or '.') else set()
        lacking = sorted(set(names) - present)
        missing += [os.path.join(folder, name) for name in lacking]
        kinds |= {names[name] for name in lacking}
    if missing:
        noun = 'masks' if kinds == {'seg_map_path'} else 'files'
        raise DataError(
            f'{_name(type(dataset))}: {len(missing)} of the {noun} its {len(dataset)} samples need '
            f'do not exist, the first is {missing[0]}. Every image needs a mask of the same name '
            f'(suffix {getattr(dataset, "seg_map_suffix", None)!r}).'
        )


def check_labels(dataset: object, index: object, sample: object) -> None:
    """Check that the mask of a packed sample has only class indices and the ignore index.

    Raises:
        DataError: If the mask has another value, or several channels. The message names its file.
    """
    labels = packed_mask(sample)
    if labels is not None:
        check_mask(dataset, index, labels)


def check_mask(dataset: object, index: object, labels: torch.Tensor) -> None:
    """Check a mask that is loaded, as :func:`check_labels`.

    Args:
        dataset: Dataset of the mask, with its wrappers if there are any.
        index: Index of the sample in ``dataset``.
        labels: The mask; channels last if it has any.
    """
    outer, (dataset, index) = dataset, innermost(dataset, index)
    # A user's wrapper may change the classes, and then has the new ones in its metainfo.
    classes = _classes(outer) or _classes(dataset)
    if not classes:
        return
    if labels.ndim == 3 and labels.shape[0] > 1 and labels.shape[-1] in (2, 3, 4):
        raise DataError(
            f'mask {_mask_name(_read_info(dataset, index)[0], index)} has '
            f'{labels.shape[-1]} channels, expected one, whose values are class indices. Save it '
            f'with one channel, or with a palette (docs/reference/datasets.md).'
        )
    ignore = ignored_label(outer, dataset, IGNORE_INDEX)
    if _are_known(labels, len(classes), ignore):
        return
    bad = (labels != ignore) & ((labels >= len(classes)) | (labels < 0))
    if not bool(bad.any()):
        return
    value = int(labels[bad][0])
    info, _ = _read_info(dataset, index)
    # reduce_zero_label has shifted the values by one; the message gives the values of the file.
    shifted = bool(info.get('reduce_zero_label'))
    expected = (
        f'0 (no data) and 1 to {len(classes)}'
        if shifted
        else f'0 to {len(classes) - 1}, and {ignore} for ignored pixels'
    )
    raise DataError(
        f'mask {_mask_name(info, index)} holds the value '
        f'{value + 1 if shifted else value} ({int(bad.sum())} pixel(s)); {len(classes)} classes '
        f'allow {expected}. Check the mask, the classes of {_name(type(dataset))} and '
        f'reduce_zero_label={shifted}.'
    )


def _are_known(labels: torch.Tensor, count: int, ignore: int) -> bool:
    """Return whether labels are certainly class indices or the ignore index.

    This runs on every sample, so it looks values up in a table instead of comparing them. Labels
    beyond uint8 are left to comparisons.
    """
    if labels.dtype not in _INTEGERS or not labels.numel():
        return False
    # As an unsigned number, a negative label is large, so that the largest one tells both limits.
    values = labels.cpu().numpy()
    high = int(values.view(f'u{values.itemsize}').max())
    if high > 255:
        return False
    if high < count:
        return True
    known = np.zeros(256, np.uint8)
    known[:count] = 1
    if 0 <= ignore < 256:
        known[ignore] = 1
    return bool(cv2.LUT(values.astype(np.uint8).reshape(1, -1), known).all())


def _mask_name(info: Mapping[str, Any], index: object) -> str:
    return info.get('seg_map_path', f'of sample {index}')


def head_differences(model: nn.Module, dataset: object) -> Iterator[Tuple[bool, str]]:
    """Yield the decode heads whose number of classes differs from the dataset's.

    Args:
        model: Model, wrapped or not.
        dataset: Dataset of a loader. Nothing is yielded if its metainfo has no classes.

    Yields:
        Whether labels would exceed the head's classes, which ends the training with an IndexError,
        and a text for the log or an error.
    """
    classes = len(_classes(dataset))
    for name, head in model.named_modules():
        if not isinstance(head, BaseDecodeHead) or not classes or head.num_classes == classes:
            continue
        # An STDCHead learns whether a pixel lies on a boundary of classes, not the classes.
        if isinstance(head, STDCHead):
            continue
        name = name[len('module.') :] if name.startswith('module.') else name
        yield (
            head.num_classes < classes,
            (
                f'model.{name} ({_name(type(head))}) has num_classes={head.num_classes}, and '
                f'{_name(type(dataset))} has {classes} classes ({", ".join(_classes(dataset))}); set '
                f'num_classes={classes}'
            ),
        )


def compare_heads(model: nn.Module, dataset: object) -> None:
    """Compare the decode heads of a model with the classes of its training data.

    A head with more classes than the dataset is only logged, because it may be intended.

    Raises:
        DataError: If a head has fewer classes than the dataset.
    """
    for fails, text in head_differences(model, dataset):
        if fails:
            raise DataError(text)
        print_log(text, logger='current', level=logging.WARNING)


def _classes(dataset: object) -> Sequence[str]:
    # This runs on every sample, and `metainfo` of MMEngine's datasets copies all classes and colors
    # at every access.
    if isinstance(dataset, BaseDataset) and type(dataset).metainfo is BaseDataset.metainfo:
        classes = dataset._metainfo.get('classes')
    else:
        classes = metainfo_of(dataset).get('classes')
    return classes if isinstance(classes, (list, tuple)) else ()


def explain_error(dataset: object, index: object, error: Exception) -> Exception:
    """Return the error to raise for a sample that could not be loaded.

    Args:
        dataset: Dataset of the loader.
        index: Index of the sample in it.
        error: Error that ``dataset[index]`` raised.

    Returns:
        A :class:`DataError` with the reason if a file is missing or corrupt, or if MapSage refused
        the sample; otherwise a :class:`SampleError` with the traceback.
    """
    if isinstance(error, DataError):
        return error
    dataset, index = innermost(dataset, index)
    info, failure = _read_info(dataset, index)
    files = ', '.join(f'{key}={info[key]}' for key in _FILE_KEYS if key in info) or 'no file known'
    text = error_text(error)
    if failure is not None and error_text(failure) != text:
        files = f'no file known, get_data_info({index}) fails too: {error_text(failure)}'
    summary = f'cannot load sample {index} of {_name(type(dataset))} ({files}): '
    reasons = [
        reason
        for key in _local_file_keys(dataset)
        for reason in [_explain_unreadable(info.get(key))]
        if reason
    ]
    if reasons:
        return DataError(summary + '; '.join(reasons))
    return (
        DataError(summary + text)
        if _is_from_mapsage(error)
        else SampleError(f'{summary}{text}\n{_format_traceback(error)}')
    )


def _format_traceback(error: BaseException) -> str:
    """Return the traceback of an error, cut to its end, where the error was raised."""
    # The first frame is the one that caught the error.
    begin = error.__traceback__ and error.__traceback__.tb_next
    text = ''.join(traceback.format_exception(type(error), error, begin or error.__traceback__))
    return (text if len(text) <= _TRACEBACK_LENGTH else f'...{text[-_TRACEBACK_LENGTH:]}').rstrip()


def _is_from_mapsage(error: BaseException) -> bool:
    """Return whether this package raised an error, or one that led to it.

    MMEngine, for example, raises the error of a transform again as another error.
    """
    cause: Optional[BaseException] = error
    while cause is not None:
        last = cause.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        if (
            last is not None
            and last.tb_frame.f_code.co_filename.startswith(_PACKAGE)
            and (isinstance(cause, ValueError) or type(cause).__module__.startswith('mapsage.'))
        ):
            return True
        cause = cause.__context__
    return False


def _explain_unreadable(path: object) -> Optional[str]:
    """Return the reason why the image file at ``path`` cannot be decoded, or None if it can."""
    if not isinstance(path, str) or '://' in path:
        return None
    if not os.path.isfile(path):
        return f'{path} does not exist'
    if os.path.getsize(path) == 0:
        return f'{path} is empty'
    if not path.lower().endswith(_DECODED_SUFFIXES):
        return None
    import cv2

    data = np.fromfile(path, dtype=np.uint8)
    if cv2.imdecode(data, cv2.IMREAD_UNCHANGED) is None:
        return f'{path} ({data.size} bytes) cannot be decoded: the file is corrupt or truncated'
    return None


def _read_info(dataset: Any, index: object) -> Tuple[Mapping[str, Any], Optional[Exception]]:
    """Return a dataset's facts about a sample, or none and the error of reading them."""
    if not lists_samples(dataset):
        return {}, None
    try:
        info = dataset.get_data_info(index)
    except Exception as error:
        # The dataset may be a user's class, which may raise anything. The caller reports another
        # error of the same sample and adds this one.
        return {}, error
    return info if isinstance(info, Mapping) else {}, None


def _name(kind: Union[str, Callable[..., Any]]) -> str:
    return kind if isinstance(kind, str) else kind.__name__
