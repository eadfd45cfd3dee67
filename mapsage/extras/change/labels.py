"""Labels of change of a pair: from one file of change, or from the classes of both dates.

Shapes:
    labels    (height, width) uint8: index of a class of change, or the ignore index
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from mapsage.geo import GeoError, Raster
from mapsage.geo.change_classes import (
    CHANGED,
    UNCHANGED,
    ChangeClassError,
    from_to_classes,
    transition_name,
)
from mapsage.geo.registration import check_same_grid

# As format_seg_map='to_binary' of Open-CD.
_CHANGED_FROM = 128
_KEYS = ('img_path_from', 'img_path_to', 'seg_map_path', 'seg_map_path_from', 'seg_map_path_to')


class LabelFolders(NamedTuple):
    """What the labels of a dataset are.

    Attributes:
        prefixes: Folders by the keys of Open-CD's ``data_prefix``.
        classes: Classes of change; 'unchanged' is the first.
        land_classes: Classes of the two files of classes; empty if there are none.
        zero_is_unchanged: Whether 0 in both files of classes is unchanged, and 1 the first class.
    """

    prefixes: Dict[str, str]
    classes: Tuple[str, ...]
    land_classes: Tuple[str, ...]
    zero_is_unchanged: bool

    @property
    def is_from_to(self) -> bool:
        """Whether the classes of change are from-to classes."""
        return bool(self.land_classes)

    @classmethod
    def of_prefixes(
        cls,
        prefixes: Mapping[str, str],
        land_classes: Optional[Sequence[str]],
        transitions: Optional[Sequence[str]],
        zero_is_unchanged: bool,
    ) -> LabelFolders:
        """Return the description of a dataset; the arguments are those of ``ChangeDataset``.

        Raises:
            ChangeClassError: If a folder is unknown or missing, or classes and folders contradict
                each other.
        """
        unknown = sorted(set(prefixes) - set(_KEYS))
        if unknown or 'img_path_from' not in prefixes or 'img_path_to' not in prefixes:
            raise ChangeClassError(
                f'data_prefix={dict(prefixes)}, expected img_path_from, '
                f'img_path_to and the folders of the labels, from {_KEYS}.'
            )
        dates = [key for key in ('seg_map_path_from', 'seg_map_path_to') if prefixes.get(key)]
        if len(dates) == 1:
            raise ChangeClassError(
                f'data_prefix names {dates[0]} only, expected the classes of '
                f'both dates: seg_map_path_from and seg_map_path_to.'
            )
        if bool(dates) != (land_classes is not None):
            raise ChangeClassError(
                f'land_classes={land_classes} with data_prefix={dict(prefixes)}: from-to classes '
                f'need land_classes, seg_map_path_from and seg_map_path_to; a label of change '
                f'(seg_map_path) needs none of them.'
            )
        if land_classes is None:
            return cls(dict(prefixes), (UNCHANGED, CHANGED), (), False)
        return cls(
            dict(prefixes),
            from_to_classes(land_classes, transitions),
            tuple(map(str, land_classes)),
            zero_is_unchanged,
        )


def read_change(pair: Mapping[str, Any], folders: LabelFolders, ignore_index: int) -> np.ndarray:
    """Return the labels of a pair, uint8 (height, width).

    Args:
        pair: Paths of its files by the keys of ``data_prefix``.
        folders: Description of the labels.
        ignore_index: Value of pixels without a label.

    Raises:
        GeoError: If a label cannot be read, or the labels contradict each other.
    """
    change = None
    if pair.get('seg_map_path'):
        values = _read(pair['seg_map_path'])
        change = values >= _CHANGED_FROM
        if values.max() == 1:
            raise GeoError(
                f'{pair["seg_map_path"]} holds 0 and 1, and a label of change is 0 or '
                f'255 (128 and more is changed). Multiply it by 255.'
            )
    if not folders.is_from_to:
        assert change is not None
        return change.astype(np.uint8)
    before, after = (_read(pair[key]) for key in ('seg_map_path_from', 'seg_map_path_to'))
    if before.shape != after.shape:
        raise GeoError(
            f'{pair["seg_map_path_from"]} has {_size(before)} pixels and '
            f'{pair["seg_map_path_to"]} {_size(after)}, expected one size.'
        )
    table, shift = _table(folders, ignore_index), int(folders.zero_is_unchanged)
    count = len(folders.land_classes)
    for key, classes in (('seg_map_path_from', before), ('seg_map_path_to', after)):
        wrong = (classes >= count + shift) & (classes != ignore_index)
        if wrong.any():
            raise GeoError(
                f'{pair[key]} holds the value {int(classes[wrong][0])}; {count} land '
                f'classes allow {shift} to {count - 1 + shift}'
                f'{" and 0 for unchanged" if shift else ""}, and {ignore_index} for '
                f'ignored pixels.'
            )
    labels = table[before, after]
    if (labels == _IMPOSSIBLE).any():
        row, column = np.argwhere(labels == _IMPOSSIBLE)[0]
        raise GeoError(
            _describe_impossible(
                pair,
                folders,
                int(before[row, column]),
                int(after[row, column]),
                (int(column), int(row)),
            )
        )
    if change is not None:
        _check_agreement(pair, change, labels, ignore_index)
    return labels.astype(np.uint8)


# Entry of the table for two values that cannot stand at one pixel.
_IMPOSSIBLE = 999


def _table(folders: LabelFolders, ignore_index: int) -> np.ndarray:
    """Return the label of each pair of values, int (256, 256)."""
    shift = int(folders.zero_is_unchanged)
    land = folders.land_classes
    table = np.full((256, 256), _IMPOSSIBLE)
    for first, before in enumerate(land):
        for second, after in enumerate(land):
            name = UNCHANGED if before == after else transition_name(before, after)
            if name in folders.classes:
                table[first + shift, second + shift] = folders.classes.index(name)
    if shift:
        table[0, 0] = 0
    if 0 <= ignore_index <= 255:
        table[ignore_index] = table[:, ignore_index] = ignore_index
    return table


def _describe_impossible(
    pair: Mapping[str, Any], folders: LabelFolders, before: int, after: int, pixel: Tuple[int, int]
) -> str:
    names = f'{pair["seg_map_path_from"]} and {pair["seg_map_path_to"]}'
    if 0 in (before, after) and folders.zero_is_unchanged:
        return (
            f'{names} hold {before} and {after} at (column, row) = {pixel}: 0 is unchanged, '
            f'and then both files hold 0. Correct the labels, or set '
            f'reduce_semantic_zero_label=False if 0 is a class.'
        )
    shift = int(folders.zero_is_unchanged)
    name = transition_name(
        folders.land_classes[before - shift], folders.land_classes[after - shift]
    )
    return (
        f'{names} hold {name!r} at (column, row) = {pixel}, which is not in transitions: '
        f'{list(folders.classes[1:])}. Add it, or correct the labels.'
    )


def _check_agreement(
    pair: Mapping[str, Any], change: np.ndarray, labels: np.ndarray, ignore_index: int
) -> None:
    """Check that a file of change and two files of classes say the same."""
    if change.shape != labels.shape:
        raise GeoError(
            f'{pair["seg_map_path"]} has {_size(change)} pixels and '
            f'{pair["seg_map_path_from"]} {_size(labels)}, expected one size.'
        )
    wrong = (change != (labels != 0)) & (labels != ignore_index)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise GeoError(
            f'{pair["seg_map_path"]} and the classes of {pair["seg_map_path_from"]} and '
            f'{pair["seg_map_path_to"]} disagree on {int(wrong.sum())} of {wrong.size} pixels, the '
            f'first at (column, row) = {(int(column), int(row))}: '
            f'{"changed" if change[row, column] else "unchanged"} in the label of change. Correct '
            f'the labels, or leave seg_map_path out: the classes say what has changed.'
        )


def check_label_grid(label: Raster, image: Raster) -> None:
    """Check that a label lies on an image of its pair.

    A label without coordinates, such as a PNG, lies on an image of its size.

    Raises:
        GeoError: If size, CRS or transform differ.
    """
    if (label.width, label.height) != (image.width, image.height):
        raise GeoError(
            f'label {label.path} has {label.width}x{label.height} pixels and the images '
            f'{image.path} {image.width}x{image.height}, expected one size.'
        )
    if label.is_georeferenced and image.is_georeferenced:
        check_same_grid(image, label)


def _read(path: str) -> np.ndarray:
    with Raster(path) as raster:
        values = raster.read_with_nodata(0, 0, raster.width, raster.height)[0]
    if values.dtype != np.uint8:
        raise GeoError(f'label {path} holds {values.dtype}, expected uint8.')
    if len(values) > 1 and not (values[1:] == values[:1]).all():
        raise GeoError(
            f'label {path} has {len(values)} bands that differ, expected one band whose '
            f'values are labels. A colored picture of labels is no label.'
        )
    return values[0]


def _size(plane: np.ndarray) -> str:
    return f'{plane.shape[1]}x{plane.shape[0]}'
