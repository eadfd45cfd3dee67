"""Training windows read directly from GeoTIFF scenes of any size and number of bands.

The dataset lists windows and gives the pipeline what it needs to read them; it reads no pixels of a
sample itself. Windows lie on a grid (`window_grid.py`) or at random positions (`windows.py`).

Shapes:
    window of the pipeline  (column, row, side) in pixels of the scene
    image                   (side, side, bands)
    mask                    (side, side) uint8, class index or 255
"""

from __future__ import annotations

import logging
import operator
from functools import partial
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
from mmengine.dist import get_dist_info
from mmengine.logging import print_log
from mmseg.datasets import BaseSegDataset
from mmseg.registry import DATASETS

from mapsage.geo import (
    SCENE_SUFFIXES,
    VECTOR_SUFFIXES,
    BurntLabels,
    GeoError,
    LabelFiles,
    Raster,
    RasterLabels,
    VectorLabels,
    gdal_environment,
    locate,
    match,
    stamp,
    suffix_of,
)
from mapsage.geo.scene_facts import (
    STORED,
    check_one_unit,
    describe_reading,
    images_by_sensor,
    open_scenes,
)

from .area import SceneAreas
from .fast_copies import FastCopies, describe_report
from .pixel_source import PixelSource
from .shared_scan import scan_scenes
from .split import SceneSplit
from .transforms import LoadGeoTiffLabels
from .window_grid import WindowGrid
from .windows import RandomWindows


@DATASETS.register_module()
class GeoTiffDataset(BaseSegDataset):
    """Windows of raster scenes, with labels from rasters or polygons.

    * Scenes: any raster that GDAL reads, of any size. uint8 is kept, other types become float32.
    * Image: (window, window, bands), with the bands in the order of ``bands``. The three bands of
      most files are red, green, blue, while a stock config expects blue first; see
      docs/reference/datasets.md.
    * Windows: a grid with step ``stride``; the last window of a row or column is moved inside the
      scene. A scene smaller than the window is padded with 0. Windows without a valid pixel are
      left out.
    * Label rasters: one band of class indices on the grid of the scene, under the same name in the
      folder ``labels``. Vector labels: polygons with a class name or index in ``class_field``, in
      any CRS; either one file for all scenes, or one for each scene, matched by name.
    * Mask: uint8, value = class index; 255 beyond the scene and where the scene or the labels have
      no data. With ``test_mode=True``, which MapSageRunner sets for validation and test, each pixel
      of a scene has its class in one window only: an overlap is divided in its middle, and each of
      the two windows has 255 in the other's half. So any metric counts each pixel once.

    The pipeline begins with ``LoadGeoTiffWindow`` and ``LoadGeoTiffLabels``.

    Args:
        scenes: Path of a file or folder, glob pattern, or list of these, relative to ``data_root``,
            or any name that GDAL opens: on a server, in an archive, a subdataset.
        labels: Path of a folder or of one file; None for scenes without labels.
        window: Side of a window in pixels.
        stride: Distance between windows in pixels; default: ``window``.
        bands: Band numbers, counted from 1; default: all but an alpha band. They are the
            numbers in the first scene: if files name their bands, the order of its names counts.
        units: Unit of the values (docs/how-to/pixels.md): ``'stored'``, as they are in the files;
            ``'reflectance'``, scale and offset applied, float32; ``'harmonized'``, without the
            1,000 that Sentinel-2's baselines add from 04.00 on.
        class_field: Name of the attribute of vector labels that holds the class.
        default_class: Class, as a name or an index, of polygons whose ``class_field`` is empty, and
            of all polygons of a file without ``class_field``. None: both are errors.
        layer: Name of the layer of vector labels; default: the only one that has ``class_field``.
        outside: Class index of pixels that no polygon covers; 255 to ignore them.
        label_nodata: Value of label rasters that means "no label"; None for no such value;
            ``'file'`` for the no-data value that each file names. If that value is a class index, a
            warning gives the number of pixels that the class loses.
        label_map: Class of each value of label rasters, as ``{10: 'tree', 20: 'shrub', 80: None}``,
            by name or index; None for no label. Default: values are class indices.
        point_radius: Radius in meters of the disk that a point of vector labels labels; by default
            points are an error. ``outside`` is then 255.
        split: Part of the scenes that counts, by blocks of ground: ``dict(by='blocks', size=500,
            unit='meters', part='train', share=0.2, margin=0, seed=0)``. The datasets of training,
            validation and test have the same values except ``part``. With ``unit='pixels'`` every
            scene is divided separately. ``share`` is the share of validation, or ``dict(val=0.2,
            test=0.1)``. Pixels outside the part, or closer than ``margin`` to another part, are
            255; windows with only such pixels are left out. None: all pixels count.
        windows: Windows at random positions instead of the grid, for training:
            ``dict(type='random', per_epoch=2000, balance='classes', redraw=True, seed=0)``.
            ``per_epoch``: length of the dataset; default: as many windows as cover the labeled area
            once. ``balance``: None to draw windows by area, ``'classes'`` for equally many windows
            at pixels of each class, or ``dict(house=0.3)`` for a share of them, the rest by area.
            ``redraw=False``: the same windows in every epoch; they depend only on ``seed``.
        aoi: Path of polygons, in any CRS and relative to ``data_root``: an area of interest.
            Windows that do not touch it are left out, and pixels outside it are 255.
        fast_copy: Copies of scenes and label rasters that are read several times faster, as
            ``dict(folder='/local/copies', max_size='100G')``: made at the first start, and shared
            by all runs that name the folder (docs/tutorials/scenes.md). None: the scenes themselves
            are read.
        metainfo: Classes and colors, as ``dict(classes=..., palette=...)``; required unless a
            subclass has ``METAINFO``.
        **kwargs: Arguments of ``BaseSegDataset``.

    Attributes:
        dtypes: Data types of the scenes, each with the path of the first scene that has it.
        pixel_sources: Facts of all images by the name of their sensor, ``''`` for single scenes.
        scene_facts: What the pipeline needs to know about each scene: keys ``scene`` (path),
            ``pixels`` (path of the file that windows are read from: the scene or its fast copy),
            ``bands``, ``part``, ``labels``, ``area`` and ``scene_shape``.
        vector_labels: Label polygons by the path of their file.
        random_windows: Random windows, or None for a grid.

    Raises:
        GeoError: If files are missing, cannot be read or do not fit together; the message gives
            the file, its content and what to do.
    """

    def __init__(
        self,
        scenes: Union[str, Sequence[str]],
        window: int,
        labels: Optional[str] = None,
        stride: Optional[int] = None,
        bands: Optional[Sequence[int]] = None,
        class_field: str = 'class_name',
        outside: int = 0,
        label_nodata: Union[None, int, str] = 'file',
        split: Optional[Dict[str, Any]] = None,
        windows: Optional[Dict[str, Any]] = None,
        aoi: Optional[str] = None,
        layer: Optional[str] = None,
        default_class: Union[None, int, str] = None,
        fast_copy: Optional[Dict[str, Any]] = None,
        units: str = STORED,
        label_map: Optional[Mapping[int, Union[None, int, str]]] = None,
        point_radius: Optional[float] = None,
        **kwargs: Any,
    ) -> None:
        self.units = units
        self.pixel_sources: Dict[str, PixelSource] = {}
        # Estimated by the summary of a start.
        self.class_shares: Dict[str, float] = {}
        self.scenes, self.labels = [scenes] if isinstance(scenes, str) else list(scenes), labels
        self.window, self.stride = _integers(
            'window and stride', (window, window if stride is None else stride)
        )
        if self.window < 1 or self.stride < 1:
            raise GeoError(f'window={window} and stride={stride}, expected pixels, at least 1.')
        self._grid = WindowGrid(self.window, self.stride)
        if windows is not None and stride is not None:
            raise GeoError(
                f'stride={stride} is the step of a grid, and windows={windows} has no '
                'grid; leave one of them out.'
            )
        self.windows = windows
        self.bands = None if bands is None else _integers('bands', bands)
        self.class_field, self.layer, self.outside = class_field, layer, outside
        self.default_class, self.point_radius = default_class, point_radius
        # The attribute label_map is MMSegmentation's, which renames the classes of a subclass.
        self._codes_by_value = None if label_map is None else dict(label_map)
        if not (label_nodata in (None, 'file') or isinstance(label_nodata, int)):
            raise GeoError(f"label_nodata={label_nodata!r}, expected 'file', None or an integer.")
        self.label_nodata = label_nodata
        self.dtypes: Dict[str, str] = {}
        self.split = None if split is None else SceneSplit(split)
        self.aoi = aoi
        self.fast_copies = None if fast_copy is None else FastCopies.of_config(fast_copy)
        self.scene_facts: List[Dict[str, Any]] = []
        self.vector_labels: Dict[str, VectorLabels] = {}
        self.random_windows: Optional[RandomWindows] = None
        super().__init__(**kwargs)

    def load_data_list(self) -> List[Dict[str, Any]]:
        """Return one entry per window that holds data: number of its scene, column and row."""
        # Entered once for all files; a scene on a server enters another environment.
        with gdal_environment('', remote=False):
            return self._list_windows()

    def _list_windows(self) -> List[Dict[str, Any]]:
        self.scene_facts = []
        counts: Dict[int, str] = {}
        rasters: List[Raster] = []
        area = SceneAreas(self.data_root, self.aoi)
        label_files = (
            None if self.labels is None else LabelFiles(locate(self.data_root, self.labels))
        )
        for scene in self._open_scenes():
            with scene:
                rasters.append(scene)
                if scene.may_have_gaps or self.windows is not None:
                    # `scan_scenes` needs the files; now the scene does not have to be opened again.
                    scene.files()
                self.dtypes.setdefault(str(scene.dtype), scene.path)
                counts.setdefault(len(scene.bands), scene.path)
                scene_part = None if self.split is None else self.split.of_scene(scene)
                self.scene_facts.append(
                    dict(
                        self._pixel_facts(scene),
                        part=scene_part,
                        labels=self._labels_of(scene, label_files),
                        area=area.of(scene),
                        scene_shape=(scene.height, scene.width),
                    )
                )
        area.check()
        self._check_units(rasters)
        self._use_fast_copies()
        for vector in self.vector_labels.values():
            vector.check_met()
        self._warn_of_hidden_classes()
        if self.split is not None:
            self.split.check()
        if len(counts) > 1:
            raise GeoError(f'scenes differ in their number of bands: {counts}; choose with bands=.')
        if self.windows is not None:
            entries = self._random_entries(rasters, self.windows)
        else:
            entries = [
                dict(scene=number, corner=corner)
                for number, corners in enumerate(self._grid.corners(rasters))
                for corner in corners
                if self._is_in_limits(number, corner)
            ]
        if not entries:
            raise GeoError(
                f'{len(self.scene_facts)} scene(s), the first '
                f'{self.scene_facts[0]["scene"]}, hold no valid pixel: '
                f'{self._explain_no_data()}'
                + (
                    ''
                    if self.split is None
                    else ' Or choose another split: perhaps '
                    f'only the blocks of part {self.split.part!r} have no data.'
                )
            )
        return entries

    def _explain_no_data(self) -> str:
        """Return why scenes may have no valid pixel, and what to check."""
        return 'all is no-data. Check the no-data value and the alpha band (rio info shows them).'

    def get_data_info(self, idx: int) -> Dict[str, Any]:
        """Return the facts that the pipeline needs to load window ``idx``.

        With ``redraw``, the position of a random window is drawn in ``prepare_data``, and the
        result has no ``scene`` and ``window`` yet.
        """
        info = super().get_data_info(idx)
        if self.random_windows is None:
            return self._facts(info, *info.pop('corner'))
        info['windows'] = self.random_windows
        if self.redraws:
            return info
        info['scene'], *corner = self.random_windows.draw_fixed(info['draw'])
        return self._facts(info, *corner)

    def prepare_data(self, idx: int) -> Any:
        """Load window ``idx``; with ``redraw``, its position is drawn from NumPy's global state.

        Transforms draw from the same state. MapSageRunner seeds it for every sample by the run's
        seed, the epoch, and the sample's position in the epoch. So the window does not depend on
        the number of ranks and workers, and a resumed run draws the same windows.
        """
        info = self.get_data_info(idx)
        if self.random_windows is not None and self.random_windows.redraw:
            info['scene'], *corner = self.random_windows.draw(np.random)
            info = self._facts(info, *corner)
        return self.pipeline(info)

    def scene_paths(self) -> List[str]:
        """Return the paths of the scenes, in the order of their numbers."""
        return [scene['scene'] for scene in self.scene_facts]

    def read_labels(
        self, number: int, column: int, row: int, side: int, of_all_parts: bool = False
    ) -> np.ndarray:
        """Return the mask that a window at this position would have, for scene ``number``.

        With ``of_all_parts``, labels count wherever they are, whatever ``split`` says.

        Returns:
            Class indices, uint8 ``(side, side)``; ``ignore_index`` at pixels without a label, and
            everywhere if the dataset has no labels.
        """
        if self.labels is None:
            return np.full((side, side), self.ignore_index, np.uint8)
        info = dict(
            self._facts(dict(scene=number), column, row),
            window=(column, row, side),
            valid=np.ones((side, side), bool),
            counted=None,
        )
        if of_all_parts:
            info['part'] = None
        return LoadGeoTiffLabels().transform(info)['gt_seg_map']

    @property
    def redraws(self) -> bool:
        """Whether the position of a window is drawn when it is loaded."""
        return self.random_windows is not None and self.random_windows.redraw

    def score_once(self) -> None:
        """Set ``test_mode``, so that every pixel is scored in one window only.

        Raises:
            GeoError: If windows are drawn at random, so that they do not cover the scenes.
        """
        if self.windows is not None:
            raise GeoError(
                f'windows={self.windows} is for training; scores need each pixel '
                'once, leave windows out in the datasets of validation and test.'
            )
        self.test_mode = True

    def _facts(self, info: Dict[str, Any], column: int, row: int) -> Dict[str, Any]:
        """Return ``info`` with all keys that the loading transforms read."""
        scene = self.scene_facts[info['scene']]
        height, width = scene['scene_shape']
        counted = (
            (*self._grid.share(row, height), *self._grid.share(column, width))
            if self.test_mode
            else None
        )
        return dict(
            info,
            **scene,
            window=(column, row, self.window),
            counted=counted,
            ignore_index=self.ignore_index,
            num_classes=len(self.file_classes()),
            label_map=self.label_map,
            reduce_zero_label=self.reduce_zero_label,
            seg_fields=[],
        )

    def _random_entries(self, scenes: List[Raster], config: Dict[str, Any]) -> List[Dict[str, Any]]:
        """Count the labels of all scenes, and return one entry per window of an epoch."""
        if self.test_mode:
            self.score_once()
        classes = list(self._metainfo.get('classes') or ()) if self.labels is not None else []
        self.random_windows = RandomWindows(config, self.window, classes, self.ignore_index)
        numbers = {scene.path: number for number, scene in enumerate(scenes)}

        def masks(scene: Raster, column: int, row: int, side: int, valid: np.ndarray) -> np.ndarray:
            info = dict(
                self._facts(dict(scene=numbers[scene.path]), column, row),
                window=(column, row, side),
                valid=valid,
            )
            if self.labels is not None:
                return LoadGeoTiffLabels().transform(info)['gt_seg_map']
            counted = valid
            for limit in (info['part'], info['area']):
                if limit is not None:
                    counted = counted & limit.mask(column, row, side, side)
            return np.where(counted, 0, self.ignore_index).astype(np.uint8)

        def scan(scene: Raster) -> np.ndarray:
            labels = self.scene_facts[numbers[scene.path]]['labels']
            try:
                return self.random_windows.count(scene, masks)  # type: ignore[union-attr]
            finally:
                scene.close()
                if isinstance(labels, RasterLabels):
                    labels.close()

        # Everything that the counts depend on, apart from the scenes: the key of the cache.
        settings = [
            self.random_windows.cell,
            self.ignore_index,
            self.file_classes(),
            self.class_field,
            self.layer,
            self.default_class,
            self.outside,
            self.label_nodata,
            self.reduce_zero_label,
            repr(self.label_map),
            # Last, so that counts from before these settings existed stay valid.
            *([] if self.point_radius is None else [self.point_radius]),
            *([] if self._codes_by_value is None else [repr(sorted(self._codes_by_value.items()))]),
        ]
        stamps = _stamps({scene['labels'].path for scene in self.scene_facts if scene['labels']})
        counts = (
            [scan(scene) for scene in scenes]
            if stamps is None
            else scan_scenes(
                scenes,
                ('labels', *settings),
                scan,
                [self._label_facts(scene, stamps) for scene in self.scene_facts],
            )
        )
        for scene, cells in zip(scenes, counts):
            self.random_windows.add(scene, cells)
        self.random_windows.finish()
        return [dict(draw=number) for number in range(self.random_windows.per_epoch)]

    @staticmethod
    def _label_facts(scene: Dict[str, Any], stamps: Dict[str, List[Any]]) -> List[Any]:
        """Return what the labels of one scene depend on, as JSON values."""
        facts: List[Any] = [repr((scene['part'], scene['area']))]
        if scene['labels'] is not None:
            facts += [stamps[scene['labels'].path], scene['labels'].settings]
        return facts

    def file_classes(self) -> List[str]:
        """Return the classes that label values refer to.

        A subclass's ``METAINFO`` takes precedence, because ``metainfo`` of a config may select some
        of its classes.
        """
        return list(self.METAINFO.get('classes') or self._metainfo.get('classes') or ())

    def describe_images(self) -> str:
        """Return text on the bands of the images, for the log."""
        return f'{len(self.scene_facts[0]["bands"])} band(s) of {" and ".join(self.dtypes)}'

    def _open_scenes(self) -> Iterator[Raster]:
        """Yield the scenes, opened."""
        return open_scenes(self._find_scenes(), self.bands, (), self.units, keep_open=True)

    def _check_units(self, scenes: List[Raster]) -> None:
        """Check that the values of all images have one unit, and log what was applied."""
        for name, images in images_by_sensor(scenes).items():
            self.pixel_sources[name] = PixelSource(images)
            check_one_unit(self.pixel_sources[name].facts)
            for text in describe_reading(images) if get_dist_info()[0] == 0 else ():
                print_log(f'{name}: {text}' if name else text, logger='current')

    def _pixel_facts(self, scene: Raster) -> Dict[str, Any]:
        """Return the facts from which the pipeline reads the pixels of a scene."""
        facts = dict(scene=scene.path, pixels=scene.path, bands=scene.bands)
        # The key of cached features, which is the text of a sample, stays for scenes as stored.
        return facts if scene.conversion is None else dict(facts, conversion=scene.conversion)

    def _label_path(self, scene: Raster, label_files: LabelFiles) -> str:
        """Return the path of the label file of a scene."""
        return label_files.find(scene.path)

    def _find_scenes(self) -> List[str]:
        paths: List[str] = []
        for pattern in self.scenes:
            paths += match(locate(self.data_root, pattern))
        if not paths:
            raise GeoError(
                f'no scenes in {self.scenes} (data_root={self.data_root!r}); expected '
                f'a file, a folder or a pattern of {", ".join(SCENE_SUFFIXES)}.'
            )
        return paths

    def _labels_of(
        self, scene: Raster, label_files: Optional[LabelFiles]
    ) -> Union[None, RasterLabels, BurntLabels]:
        """Return the labels of a scene, or None if the dataset has no labels."""
        if label_files is None:
            return None
        classes = self.file_classes()
        if not classes:
            raise GeoError(
                "metainfo has no classes; set metainfo=dict(classes=('background', ...))."
            )
        if not (0 <= self.outside < len(classes) or self.outside == self.ignore_index):
            raise GeoError(
                f'outside={self.outside}, expected a class index 0 to '
                f'{len(classes) - 1}, or {self.ignore_index} to ignore.'
            )
        path = self._label_path(scene, label_files)
        if suffix_of(path) not in VECTOR_SUFFIXES:
            for name, value, lacking in (
                ('layer', self.layer, 'layers'),
                ('default_class', self.default_class, 'polygons'),
                ('point_radius', self.point_radius, 'points'),
            ):
                if value is not None:
                    raise GeoError(
                        f'{name}={value!r}, but the labels {path} are a raster, which '
                        f'has no {lacking}: leave it out.'
                    )
            return RasterLabels(path, scene, self.label_nodata, self._label_codes(classes))
        if self.point_radius is not None and self.outside != self.ignore_index:
            raise GeoError(
                f'point_radius={self.point_radius} with outside={self.outside}: points say nothing '
                f'of the pixels between them, which would all be class {self.outside}. Set '
                f'outside={self.ignore_index}.'
            )
        if self._codes_by_value is not None:
            raise GeoError(
                f'label_map={self._codes_by_value}, but the labels {path} are polygons, which name '
                f'their class in {self.class_field!r}: leave it out.'
            )
        if self.reduce_zero_label:
            raise GeoError(
                f'{path}: reduce_zero_label=True is for rasters whose 0 means no data; '
                'polygons name their class, leave it out.'
            )
        if path not in self.vector_labels:
            self.vector_labels[path] = VectorLabels(
                path,
                self.class_field,
                classes,
                self.ignore_index,
                self.layer,
                self.default_class,
                self.point_radius,
            )
        return self.vector_labels[path].for_scene(scene, self.outside)

    def _label_codes(self, classes: Sequence[str]) -> Optional[Dict[int, Optional[int]]]:
        """Return the class index of each value of label rasters, or None if values are indices."""
        if self._codes_by_value is None:
            return None
        names: Dict[object, int] = {name: index for index, name in enumerate(classes)}
        names.update({index: index for index in range(len(classes))})
        codes = {
            value: None if name is None else names.get(name, -1)
            for value, name in self._codes_by_value.items()
        }
        wrong = [value for value, index in codes.items() if type(value) is not int or index == -1]
        if wrong or not codes or self.reduce_zero_label:
            raise GeoError(
                f'label_map={self._codes_by_value}'
                + (f' has {self._codes_by_value[wrong[0]]!r} for {wrong[0]!r}' if wrong else '')
                + f': expected a class of {list(classes)}, its index or None for each whole number '
                f'of the label rasters, and reduce_zero_label=False.'
            )
        return codes

    def read_rasters(self) -> List[str]:
        """Return the paths of all rasters that samples are read from: scenes and label rasters."""
        paths = [scene['scene'] for scene in self.scene_facts]
        paths += [
            scene['labels'].path
            for scene in self.scene_facts
            if isinstance(scene['labels'], RasterLabels)
        ]
        return list(dict.fromkeys(paths))

    def _use_fast_copies(self) -> None:
        """Read samples from the fast copies, which are made if they are missing.

        Scans still read the scenes: at a low resolution a scene with overviews has other pixels
        than its copy.
        """
        if self.fast_copies is None:
            return
        is_shown = get_dist_info()[0] == 0
        report = self.fast_copies.make(
            self.read_rasters(), partial(print_log, logger='current') if is_shown else None
        )
        for scene in self.scene_facts:
            self._read_copies(scene, report.copies)
            if isinstance(scene['labels'], RasterLabels):
                path = scene['labels'].path
                scene['labels'].read_from(report.copies.get(path, path))
        for line in describe_report(report, self.fast_copies.folder) if is_shown else ():
            print_log(line, logger='current')

    def _read_copies(self, scene: Dict[str, Any], copies: Mapping[str, str]) -> None:
        """Let the pipeline read the pixels of a scene from its fast copy, if it has one."""
        scene['pixels'] = copies.get(scene['scene'], scene['scene'])

    def _warn_of_hidden_classes(self) -> None:
        """Warn if the no-data value of label files is the index of a class."""
        if self.label_nodata != 'file' or self.reduce_zero_label or get_dist_info()[0]:
            return
        classes = self.file_classes()
        labels = [scene['labels'] for scene in self.scene_facts]
        hiding = [
            raster
            for raster in labels
            if isinstance(raster, RasterLabels)
            # Codes are no class indices: 0 is mostly no data where label_map names the others.
            and self._codes_by_value is None
            and raster.nodata is not None
            and 0 <= float(raster.nodata) < len(classes)
        ]
        pixels = self._count_unlabeled(hiding)
        if pixels:
            first = hiding[0]
            value = int(first.nodata)  # type: ignore[arg-type]
            print_log(
                f'labels {first.path}'
                + f' and {len(hiding) - 1} more' * (len(hiding) > 1)
                + f' name {value} as their no-data value, which is the index of class '
                f'{classes[value]!r}: {pixels:,} pixels are ignored, not of that class. Set '
                f'label_nodata=None if they are of that class, label_nodata={value} if they '
                f'have no label.',
                logger='current',
                level=logging.WARNING,
            )

    @staticmethod
    def _count_unlabeled(rasters: Sequence[RasterLabels]) -> int:
        """Return how many pixels have no label; the files are read at the first start only."""
        by_path = {labels.path: labels for labels in rasters}

        def scan(raster: Raster) -> np.ndarray:
            labels = by_path[raster.path]
            try:
                return np.array(labels.count_unlabeled(), np.int64)
            finally:
                labels.close()

        counts = scan_scenes(
            [labels.raster for labels in by_path.values()],
            ('unlabeled',),
            scan,
            [labels.settings for labels in by_path.values()],
        )
        return sum(int(count) for count in counts)

    def _is_in_limits(self, scene: int, corner: Tuple[int, int]) -> bool:
        """Return whether a window contains a pixel that counts in ``split`` and one in ``aoi``."""
        limits = self.scene_facts[scene]['part'], self.scene_facts[scene]['area']
        return all(
            limit is None or limit.meets(*corner, self.window, self.window) for limit in limits
        )


def _integers(name: str, values: Iterable[Any]) -> List[int]:
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise GeoError(f'{name}={values!r}, expected whole numbers.') from None


def _stamps(paths: Iterable[str]) -> Optional[Dict[str, List[Any]]]:
    """Return the stamps of files, which change with their content, by path.

    Returns None if a file has no stamp, so that a change of its content would not be noticed.
    """
    try:
        stamps = {path: stamp(path) for path in paths}
    except (OSError, GeoError):
        return None
    return stamps if all(len(file_stamp) > 1 for file_stamp in stamps.values()) else None
