"""Find mistakes in a user's dataset, and name the file."""
from __future__ import annotations

import inspect
import logging
import os
import traceback
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import numpy as np
import torch
from mmengine.logging import print_log
from mmseg.models.decode_heads import STDCHead
from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from mmseg.registry import DATASETS
from torch import nn

from mapsage.distributed import error_text
from mapsage.errors import UserError

from .dataset_parts import innermost, loads_images, loads_masks, parts, reads_remotely

IGNORE_INDEX = 255  # MMSegmentation's default, for a dataset that does not set ignore_index

_FILES = ('img_path', 'seg_map_path')  # keys of a sample's files
# Formats that OpenCV decodes whole. It refuses many good files of others, such as TIFF.
_DECODED = ('.png', '.jpg', '.jpeg', '.bmp', '.webp')
# Characters of a traceback in a message. The report of a rank's error has at most 4,000 bytes.
_TRACEBACK = 2500
_PACKAGE = f'{Path(__file__).resolve().parents[2]}{os.sep}'


class DataError(UserError, ValueError):
    """A dataset or one of its files is unusable; the message names it."""


class SampleError(UserError, RuntimeError):
    """A transform or a dataset failed on a sample; the message ends with its traceback."""


def build_checked(build: Any, config: Dict[str, Any]) -> Any:
    """Build a dataset and check that it has samples and that their files exist.

    Args:
        build: Function that turns ``config`` into a fully initialized dataset.
        config: Config of the dataset.

    Raises:
        DataError: If its folder is missing or empty, if an image has no mask, or if the dataset
            itself refuses its files or arguments.
    """
    kind, place = config.get('type', 'dataset'), config.get('data_root', '')
    try:
        dataset = build(config)
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = getattr(error, 'filename', None) or error
        raise DataError(
            f'{_name(kind)}: {missing} does not exist (data_root={place!r}). Point data_root and '
            f'data_prefix at the data, or make it first (docs/datasets.md).') from error
    except ValueError as error:
        # For an empty list of samples, MMEngine's BaseDataset raises this error of NumPy's.
        if 'need at least one array to concatenate' not in str(error):
            if not _is_ours(error):
                raise  # from the user's code, whose traceback shows the line
            raise DataError(f'{_name(kind)}: {error}') from error
        dataset = ()
    if not hasattr(dataset, '__len__'):
        return dataset  # a stream has no length
    if len(dataset) == 0:
        raise DataError(f'{_name(kind)} found no samples under data_root={place!r}, data_prefix='
                        f"{config.get('data_prefix')}: {_why_no_samples(config)}")
    check_files_exist(dataset)
    return dataset


def _why_no_samples(config: Mapping[str, Any]) -> str:
    kind = config.get('type')
    if isinstance(kind, str):
        kind = DATASETS.get(kind)
    # Python 3.8 gives a generic class the signature of its __new__: (*args, **kwds).
    build = kind.__init__ if isinstance(kind, type) else kind  # type: ignore[misc]
    default = inspect.signature(build).parameters.get('img_suffix') if callable(build) else None
    wanted = config.get('img_suffix', getattr(default, 'default', None))
    folder = os.path.join(str(config.get('data_root') or ''),
                          str(_part(config, 'data_prefix').get('img_path') or ''))
    files = Counter(os.path.splitext(path)[1] for path in os.listdir(folder)) \
        if isinstance(wanted, str) and os.path.isdir(folder) else Counter()
    suffix, count = next((pair for pair in files.most_common() if pair[0]), ('', 0))
    if not suffix or any(name.endswith(wanted) for name in os.listdir(folder)):
        return ('the folder is empty, or its files do not end in the img_suffix of the dataset '
                '(LoveDA: .png).')
    return (f'no file ends in img_suffix={wanted!r}. {folder} holds {count} file(s) that end in '
            f'{suffix}: set img_suffix={suffix!r} in the dataset.')


def band_order_note(cfg: Mapping[str, Any]) -> Optional[str]:
    """Return a warning if the bands of scenes would reach the model in reverse order, else None.

    The bands of a scene's file usually begin with red, and ``bgr_to_rgb`` expects blue first.

    Args:
        cfg: Config of the run.
    """
    preprocessor = _part(_part(cfg, 'model'), 'data_preprocessor')
    if not preprocessor.get('bgr_to_rgb'):
        return None
    for loader in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        dataset = _part(_part(cfg, loader), 'dataset')
        first = next(iter(dataset.get('pipeline') or ()), None)
        bands = list(dataset.get('bands') or (1, 2, 3))
        if isinstance(first, Mapping) and first.get('type') == 'LoadGeoTiffWindow' \
                and bands == sorted(bands):
            return (f'{loader}: LoadGeoTiffWindow gives the bands as {bands}, and bgr_to_rgb=True '
                    f'of the data_preprocessor reverses them. If the files begin with red, set '
                    f'bands={bands[::-1]} in the dataset, or remove bgr_to_rgb.')
    return None


def _part(cfg: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a part of a config; empty if it is missing or has been built already."""
    part = cfg.get(key)
    return part if isinstance(part, Mapping) else {}


def check_files_exist(dataset: Any) -> None:
    """Check that every local image and mask of a dataset exists, by listing each folder once.

    Datasets inside of wrappers are checked once each. Masks count only if the pipeline loads them,
    so that a test set without labels passes; paths that a file backend maps are not checked.

    Raises:
        DataError: If files are missing. It gives the name of the first and the number of them.
    """
    for part in parts(dataset):
        keys = _local_files(part)
        if keys and hasattr(part, 'get_data_info'):
            _check_files_of(part, keys)


def _local_files(dataset: Any) -> Tuple[str, ...]:
    """Return the keys of those files of a sample that are read from a local disk."""
    if reads_remotely(dataset):
        return ()
    return tuple(key for key, loads in zip(_FILES, (loads_images, loads_masks)) if loads(dataset))


def _check_files_of(dataset: Any, keys: Sequence[str]) -> None:
    wanted: Dict[str, Dict[str, str]] = defaultdict(dict)
    for index in range(len(dataset)):
        info = dataset.get_data_info(index)
        for key in keys:
            path = info.get(key)
            if isinstance(path, str) and '://' not in path:
                folder, name = os.path.split(path)
                wanted[folder].setdefault(name, key)
    missing: List[str] = []
    kinds: Set[str] = set()
    for folder, names in wanted.items():
        present = set(os.listdir(folder or '.')) if os.path.isdir(folder or '.') else set()
        lacking = sorted(set(names) - present)
        missing += [os.path.join(folder, name) for name in lacking]
        kinds |= {names[name] for name in lacking}
    if missing:
        what = 'masks' if kinds == {'seg_map_path'} else 'files'
        raise DataError(
            f'{_name(type(dataset))}: {len(missing)} of the {what} its {len(dataset)} samples need '
            f'do not exist, the first is {missing[0]}. Every image needs a mask of the same name '
            f'(suffix {getattr(dataset, "seg_map_suffix", None)!r}).')


def check_labels(dataset: Any, index: int, sample: Any) -> None:
    """Check that the mask of a packed sample has only class indices and the ignore index.

    Raises:
        DataError: If it has another value, or several channels. The message names the mask file.
    """
    labels = getattr(getattr(_data_sample(sample), 'gt_sem_seg', None), 'data', None)
    outer, (dataset, index) = dataset, innermost(dataset, index)
    # A wrapper of the user's own may change the classes, and says so in its metainfo.
    classes = _classes(outer) or _classes(dataset)
    if not isinstance(labels, torch.Tensor) or not classes:
        return
    if labels.ndim == 3 and labels.shape[0] > 1 and labels.shape[-1] in (2, 3, 4):
        raise DataError(
            f"mask {_info(dataset, index).get('seg_map_path', f'of sample {index}')} has "
            f'{labels.shape[-1]} channels, expected one, whose values are class indices. Save it '
            f'with one channel, or with a palette (docs/datasets.md).')
    ignore = getattr(outer, 'ignore_index', getattr(dataset, 'ignore_index', IGNORE_INDEX))
    # Comparisons are used instead of a sort, since this runs on every sample.
    bad = (labels != ignore) & ((labels >= len(classes)) | (labels < 0))
    if not bool(bad.any()):
        return
    value = int(labels[bad][0])
    info = _info(dataset, index)
    shifted = bool(info.get('reduce_zero_label'))
    expected = (f'0 (no data) and 1 to {len(classes)}' if shifted else
                f'0 to {len(classes) - 1}, and {ignore} for ignored pixels')
    raise DataError(
        f"mask {info.get('seg_map_path', f'of sample {index}')} holds the value "
        f'{value + 1 if shifted else value} ({int(bad.sum())} pixel(s)); {len(classes)} classes '
        f'allow {expected}. Check the mask, the classes of {_name(type(dataset))} and '
        f'reduce_zero_label={shifted}.')


def head_differences(model: nn.Module, dataset: Any) -> Iterator[Tuple[bool, str]]:
    """Yield a text for each decode head that has another number of classes than a dataset.

    Args:
        model: Model, wrapped or not.
        dataset: Dataset of a loader; nothing is yielded if it does not say its classes.

    Yields:
        Whether labels would be outside the head's classes, which ends the training with an
        IndexError, and the text.
    """
    classes = len(_classes(dataset))
    for name, head in model.named_modules():
        if not isinstance(head, BaseDecodeHead) or not classes or head.num_classes == classes:
            continue
        if isinstance(head, STDCHead):  # it learns whether a pixel is on a boundary of classes
            continue
        name = name[len('module.'):] if name.startswith('module.') else name
        yield head.num_classes < classes, (
            f'model.{name} ({_name(type(head))}) has num_classes={head.num_classes}, and '
            f'{_name(type(dataset))} has {classes} classes ({", ".join(_classes(dataset))}); set '
            f'num_classes={classes}')


def compare_heads(model: nn.Module, dataset: Any) -> None:
    """Compare the decode heads of a model with the classes of its training data.

    A head with more classes than the dataset is logged, since it may have been chosen so.

    Raises:
        DataError: If a head has fewer classes than the dataset.
    """
    for fails, text in head_differences(model, dataset):
        if fails:
            raise DataError(text)
        print_log(text, logger='current', level=logging.WARNING)


def _classes(dataset: Any) -> Sequence[str]:
    metainfo = getattr(dataset, 'metainfo', None)
    classes = metainfo.get('classes') if isinstance(metainfo, Mapping) else None
    return classes if isinstance(classes, (list, tuple)) else ()


def explain_error(dataset: Any, index: Any, error: Exception) -> Exception:
    """Return the error to raise for a sample that could not be loaded.

    Args:
        dataset: Dataset that was asked for the sample.
        index: Index that it was asked for.
        error: What it raised.

    Returns:
        A :class:`DataError` with the reason where a file is missing or corrupt, or where MapSage
        itself refused the sample; otherwise a :class:`SampleError` with the traceback.
    """
    if isinstance(error, DataError):
        return error
    dataset, index = innermost(dataset, index)
    info = _info(dataset, index)
    files = ', '.join(f'{key}={info[key]}' for key in _FILES if key in info) or 'no file known'
    what = f'cannot load sample {index} of {_name(type(dataset))} ({files}): '
    reasons = [reason for key in _local_files(dataset)
               for reason in [_unreadable(info.get(key))] if reason]
    if reasons:
        return DataError(what + '; '.join(reasons))
    text = error_text(error)
    return DataError(what + text) if _is_ours(error) else SampleError(
        f'{what}{text}\n{_frames(error)}')


def _frames(error: BaseException) -> str:
    """Return the traceback of an error; of a long one, the end, where the error was raised."""
    begin = error.__traceback__ and error.__traceback__.tb_next  # the first frame is the caller's
    text = ''.join(traceback.format_exception(type(error), error, begin or error.__traceback__))
    return (text if len(text) <= _TRACEBACK else f'...{text[-_TRACEBACK:]}').rstrip()


def _is_ours(error: BaseException) -> bool:
    """Return whether this package refused something, because of another error or followed by one.

    MMEngine, for example, raises the error of a transform anew.
    """
    each: Optional[BaseException] = error
    while each is not None:
        last = each.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        if (last is not None and last.tb_frame.f_code.co_filename.startswith(_PACKAGE)
                and (isinstance(each, ValueError) or type(each).__module__.startswith('mapsage.'))):
            return True
        each = each.__context__
    return False


def _unreadable(path: Any) -> Optional[str]:
    """Return why the image file at ``path`` cannot be decoded, or None if it can."""
    if not isinstance(path, str) or '://' in path:
        return None
    if not os.path.isfile(path):
        return f'{path} does not exist'
    if os.path.getsize(path) == 0:
        return f'{path} is empty'
    if not path.lower().endswith(_DECODED):
        return None
    import cv2
    data = np.fromfile(path, dtype=np.uint8)
    if cv2.imdecode(data, cv2.IMREAD_UNCHANGED) is None:
        return f'{path} ({data.size} bytes) cannot be decoded: the file is corrupt or truncated'
    return None


def _data_sample(sample: Any) -> Any:
    return sample.get('data_samples') if isinstance(sample, dict) else None


def _info(dataset: Any, index: Any) -> Mapping[str, Any]:
    """Return what a dataset says about a sample; nothing if that fails too."""
    try:
        info = dataset.get_data_info(index)
    except Exception:  # the report of an error must not fail
        return {}
    return info if isinstance(info, Mapping) else {}


def _name(kind: Any) -> str:
    return kind if isinstance(kind, str) else kind.__name__
