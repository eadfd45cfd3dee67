"""Find mistakes in a user's dataset, and name the file."""
from __future__ import annotations

import os
from collections import defaultdict
from typing import Any, Dict, List, Mapping, Optional, Set

import numpy as np
import torch

IGNORE_INDEX = 255  # MMSegmentation's default, for a dataset that does not set ignore_index


class DataError(ValueError):
    """A dataset or one of its files is unusable; the message names it."""


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
            raise DataError(f'{_name(kind)}: {error}') from error
        dataset = ()
    if not hasattr(dataset, '__len__'):
        return dataset  # a stream has no length
    if len(dataset) == 0:
        raise DataError(
            f'{_name(kind)} found no samples under data_root={place!r}, data_prefix='
            f"{config.get('data_prefix')}: the folder is empty, or its files do not end in the "
            f'img_suffix of the dataset (LoveDA: .png).')
    check_files_exist(dataset)
    return dataset


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

    Raises:
        DataError: If files are missing. It gives the name of the first and the number of them.
    """
    if not hasattr(dataset, 'get_data_info') or getattr(dataset, 'backend_args', None):
        return
    wanted: Dict[str, Dict[str, str]] = defaultdict(dict)
    for index in range(len(dataset)):
        info = dataset.get_data_info(index)
        for key in ('img_path', 'seg_map_path'):
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
        DataError: If it has another value. The message names the mask file and the value.
    """
    truth = getattr(_data_sample(sample), 'gt_sem_seg', None)
    classes = (getattr(dataset, 'metainfo', None) or {}).get('classes')
    if truth is None or not classes or not isinstance(truth.data, torch.Tensor):
        return
    labels = truth.data
    ignore = getattr(dataset, 'ignore_index', IGNORE_INDEX)
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


def explain_error(dataset: Any, index: int, error: Exception) -> Exception:
    """Return a :class:`DataError` that names the files of a failed sample and the reason."""
    if isinstance(error, DataError):
        return error
    info = _info(dataset, index)
    reasons = [reason for key in ('img_path', 'seg_map_path')
               for reason in [_unreadable(info.get(key))] if reason]
    files = ', '.join(f'{key}={info[key]}' for key in ('img_path', 'seg_map_path') if key in info)
    return DataError(
        f"cannot load sample {index} of {_name(type(dataset))} ({files or 'no file known'}): "
        f"{'; '.join(reasons) or f'{type(error).__name__}: {error}'}")


def _unreadable(path: Any) -> Optional[str]:
    """Return why the image file at ``path`` cannot be decoded, or None if it can."""
    if not isinstance(path, str) or '://' in path:
        return None
    if not os.path.isfile(path):
        return f'{path} does not exist'
    import cv2
    data = np.fromfile(path, dtype=np.uint8)
    if data.size == 0 or cv2.imdecode(data, cv2.IMREAD_UNCHANGED) is None:
        return f'{path} ({data.size} bytes) cannot be decoded: the file is corrupt or truncated'
    return None


def _data_sample(sample: Any) -> Any:
    return sample.get('data_samples') if isinstance(sample, dict) else None


def _info(dataset: Any, index: int) -> Dict[str, Any]:
    return dataset.get_data_info(index) if hasattr(dataset, 'get_data_info') else {}


def _name(kind: Any) -> str:
    return kind if isinstance(kind, str) else kind.__name__
