"""Pairs of images of two dates with labels of change, in the folders of Open-CD.

A sample is a stack of one sensor with two dates (`mapsage/geo/stacks/layout.py`). This dataset reads
whole files, GeoTIFFs too, and its label belongs to a pair. Windows of large scenes are read by
`SceneStackDataset` with the same sensors, whose label belongs to a place.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from mmseg.datasets import BaseSegDataset
from mmseg.registry import DATASETS

from mapsage.base.errors import UserError
from mapsage.geo import Raster, facts_of
from mapsage.geo.change_classes import (
    ChangeClassError,
    transition_palette,
)
from mapsage.geo.places import shift_note
from mapsage.geo.registration import ShiftReport, check_same_grid, pair_shifts, summarize_shifts
from mapsage.geo.scene_facts import STORED, check_one_unit
from mapsage.geo.stacks import NO_DAY, StackLayout, day_number
from mapsage.pictures.tiles import class_palette

from .labels import LabelFolders, check_label_grid, read_change
from .loading import open_pair

# Pairs whose shift is measured before a training, and blocks in each of them.
_MEASURED_PAIRS, _BLOCKS_OF_A_PAIR = 32, 4
_SUFFIXES = ('.png', '.tif', '.tiff', '.jpg', '.jpeg', '.bmp')


class ChangeDataError(UserError, ValueError):
    """Folders of a change dataset that do not fit together."""


@DATASETS.register_module()
class ChangeDataset(BaseSegDataset):
    """Pairs of images before and after, and what has changed: the folders of Open-CD.

    Folders, with files of the same names in all of them:

    * ``img_path_from``, ``img_path_to`` (Open-CD: ``A``, ``B``): images before and after, with the
      same size and, if they have coordinates, the same grid.
    * ``seg_map_path`` (``label``): 0 is unchanged, values from 128 up are changed
      (``format_seg_map='to_binary'``). Classes: 'unchanged', 'changed'.
    * ``seg_map_path_from``, ``seg_map_path_to`` (SECOND: ``label1``, ``label2``), instead of it:
      the classes of both dates. A pixel with two different classes gets a from-to class such as
      'forest > building'; two equal classes are 'unchanged'. With both kinds of labels, they must
      agree on what has changed.

    Sizes and grids of all images and labels are compared first, and training pairs need a changed
    pixel. :meth:`notes` measures the shift between the dates, which the log of a training shows.

    Args:
        sensors: The one sensor with its bands, counted from 1, and two dates, as in the data
            preprocessor: ``dict(image=dict(bands=[1, 2, 3], max_dates=2))``. The bands of a picture
            are red, green, blue.
        land_classes: Names of the classes of ``seg_map_path_from`` and ``seg_map_path_to``.
        land_palette: Red, green and blue of each of them; default: made colors.
        transitions: From-to classes that occur, such as ``['forest > building']``; default: all
            pairs of different classes.
        reduce_semantic_zero_label: Whether the classes are stored as 1, 2, ..., and 0 at both dates
            means unchanged, as in SECOND. Otherwise they are stored as 0, 1, ...
        dates: Days of the first and second date, as ``('2019-06-14', '2023-07-02')``; None if
            unknown or different.
        units: Unit of the values, as in ``GeoTiffDataset``. Both dates of a pair must have one.
        max_shift: Largest shift between the dates in pixels without a warning; None not to measure.
        **kwargs: Arguments of ``BaseSegDataset``.

    Raises:
        ChangeDataError, GeoError: If files are missing or do not fit together.
        ChangeClassError: If classes do not suit the labels.
    """

    METAINFO: Dict[str, Any] = {}

    def __init__(
        self,
        sensors: Mapping[str, Mapping[str, Any]],
        land_classes: Optional[Sequence[str]] = None,
        land_palette: Optional[Sequence[Sequence[int]]] = None,
        transitions: Optional[Sequence[str]] = None,
        reduce_semantic_zero_label: bool = False,
        dates: Optional[Sequence[str]] = None,
        max_shift: Optional[float] = 1.0,
        units: str = STORED,
        data_prefix: Optional[Dict[str, str]] = None,
        metainfo: Optional[Dict[str, Any]] = None,
        **kwargs: Any,
    ) -> None:
        self.folders = LabelFolders.of_prefixes(
            data_prefix or dict(img_path_from='A', img_path_to='B', seg_map_path='label'),
            land_classes,
            transitions,
            reduce_semantic_zero_label,
        )
        self.layout = StackLayout.of_config(sensors)
        sensor = self.layout.sensors[0]
        if [sensor.max_dates for sensor in self.layout.sensors] != [2] or not all(
            band.isdecimal() and int(band) for band in sensor.bands
        ):
            raise ChangeDataError(
                f'sensors={sensors}, expected one sensor, with numbers of bands '
                f'from 1 and max_dates=2.'
            )
        self.bands = [int(band) for band in sensor.bands]
        self.dates = _parse_dates(dates)
        self.max_shift, self.units = max_shift, units
        classes = self.folders.classes
        palette: Any = [[255, 255, 255], [230, 25, 75]]
        if land_classes is not None and self.folders.is_from_to:
            colors = land_palette or _made_colors(len(land_classes))
            if len(colors) != len(land_classes):
                raise ChangeClassError(
                    f'land_palette has {len(colors)} colors, expected '
                    f'{len(land_classes)}, one for each land class.'
                )
            palette = transition_palette(classes, land_classes, colors)
        super().__init__(
            data_prefix=self.folders.prefixes,
            metainfo=dict(dict(classes=classes, palette=palette), **metainfo or {}),
            **kwargs,
        )

    def load_data_list(self) -> List[Dict[str, Any]]:
        """Return one entry for each pair, with the paths of its files."""
        names = self._names()
        pairs = [
            {key: os.path.join(str(folder), name) for key, folder in self._folders().items()}
            for name in names
        ]
        # Every rank refuses the same files. Only rank 0 measures.
        self._check_pairs(pairs)
        return [
            dict(
                pair,
                img_path=pair['img_path_from'],
                stack_layout=self.layout,
                days=self.dates,
                units=self.units,
                label_folders=self.folders,
                label_map=self.label_map,
                reduce_zero_label=self.reduce_zero_label,
                seg_fields=[],
            )
            for pair in pairs
        ]

    def measure_shift(self) -> ShiftReport:
        """Measure the shift between the dates on a few pairs, spread evenly over the dataset."""
        step = max(1, len(self) // _MEASURED_PAIRS)
        pairs = [self.get_data_info(index) for index in range(0, len(self), step)]
        return summarize_shifts(
            [
                shift
                for pair in pairs[:_MEASURED_PAIRS]
                for shift in pair_shifts(
                    pair['img_path_from'], pair['img_path_to'], self.bands, _BLOCKS_OF_A_PAIR
                )
            ]
        )

    def start_notes(self) -> List[Tuple[int, str]]:
        """Return the shift between the dates of training pairs: a logging level and a text."""
        if self.test_mode or self.max_shift is None:
            return []
        return [shift_note(self.measure_shift(), self.max_shift)]

    def _folders(self) -> Dict[str, Path]:
        return {key: Path(folder) for key, folder in self.data_prefix.items() if folder}

    def _names(self) -> List[str]:
        """Return the names of the pairs; all folders must have a file of each name."""
        folders = self._folders()
        if self.ann_file:
            names = [
                name if os.path.splitext(name)[1] else name + self.img_suffix
                for name in _listed_names(Path(self.ann_file))
            ]
        else:
            names = _images_in(folders['img_path_from'])
        source = self.ann_file or folders['img_path_from']
        for key, folder in folders.items():
            present = set(_images_in(folder))
            missing = sorted(set(names) - present)
            if missing and (not self.test_mode or key.startswith('img_path')):
                raise ChangeDataError(
                    f'{len(missing)} of {len(names)} names of {source} are not '
                    f'in {folder} ({key}), the first is {missing[0]}. Files of a pair have the '
                    f'same name in all folders.'
                )
            surplus = sorted(present - set(names))
            if surplus and not self.ann_file:
                raise ChangeDataError(
                    f'{folder} ({key}) has {len(surplus)} file(s) that '
                    f'{folders["img_path_from"]} lacks, the first is {surplus[0]}. Files of a pair '
                    f'have the same name in all folders.'
                )
        if not names:
            raise ChangeDataError(
                f'{source} has no pair, expected images with names that end in '
                f'{" ".join(_SUFFIXES)}.'
            )
        return names

    def _check_pairs(self, pairs: List[Dict[str, str]]) -> None:
        for pair in pairs:
            before, after = open_pair(pair, self.bands, self.units)
            with before, after:
                check_same_grid(before, after)
                check_one_unit(map(facts_of, (before, after)))
                self._check_label_grids(pair, before)
        if not self.test_mode:
            self._check_any_change(pairs)

    @staticmethod
    def _check_label_grids(pair: Mapping[str, str], image: Raster) -> None:
        for key, path in pair.items():
            # Pairs of a test need no labels.
            if key.startswith('seg_map') and os.path.isfile(path):
                with Raster(path) as label:
                    check_label_grid(label, image)

    def _check_any_change(self, pairs: List[Dict[str, str]]) -> None:
        if not any(key.startswith('seg_map') for key in pairs[0]):
            return
        for pair in pairs:
            labels = read_change(pair, self.folders, self.ignore_index)
            if ((labels != 0) & (labels != self.ignore_index)).any():
                return
        raise ChangeDataError(
            f'no pixel of the {len(pairs)} pairs is changed (data_root={self.data_root!r}): a '
            f'model would learn to say "unchanged" everywhere. Check the labels; in a change label '
            f'0 is unchanged and 128 to 255 is changed.'
        )


def _images_in(folder: Path) -> List[str]:
    if not folder.is_dir():
        raise ChangeDataError(
            f'folder {folder} does not exist. Set data_root and data_prefix '
            f'(Open-CD: train/A, train/B, train/label).'
        )
    return sorted(name for name in os.listdir(folder) if name.lower().endswith(_SUFFIXES))


def _listed_names(path: Path) -> List[str]:
    """Return the names in a list, one in each line."""
    try:
        # Editors of Windows begin a file in UTF-8 with a byte order mark.
        lines = path.read_text(encoding='utf-8-sig').splitlines()
    except OSError as error:
        raise ChangeDataError(
            f'the list of pairs {path} (ann_file) cannot be read: '
            f'{error.strerror}. Correct the path; without ann_file all pairs of '
            f'the folders are taken.'
        ) from error
    except UnicodeDecodeError as error:
        raise ChangeDataError(
            f'the list of pairs {path} (ann_file) is not in UTF-8, at byte '
            f'{error.start}. Convert it, for example with iconv -f gbk -t utf-8.'
        ) from error
    return [line.strip() for line in lines if line.strip()]


def _parse_dates(dates: Optional[Sequence[str]]) -> Tuple[int, int]:
    """Return two day numbers; 0 for unknown dates."""
    if dates is None:
        return NO_DAY, NO_DAY
    try:
        first, second = (day_number(datetime.date.fromisoformat(str(date))) for date in dates)
    except ValueError as error:
        raise ChangeDataError(
            f"dates={dates!r}, expected two days such as ('2019-06-14', '2023-07-02'): {error}"
        ) from error
    if first > second:
        raise ChangeDataError(
            f'dates={tuple(dates)!r}: the second date is before the first one. '
            f'Exchange img_path_from and img_path_to, or correct the dates.'
        )
    return first, second


def _made_colors(count: int) -> List[List[int]]:
    return class_palette(count, None).tolist()
