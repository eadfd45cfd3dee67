"""Semantic segmentation from COCO polygons, which are rasterized while loading.

`CocoPolygonDataset` reads and checks the JSON once; `LoadPolygonAnnotations` draws the mask of each
sample. Categories are matched with classes by name, never by id.

Shapes:
    rings         list of (N, 2) float64 arrays of x, y in pixels: the outlines of one instance
    gt_seg_map    (H, W) uint8, class index, or 255 for crowds
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import mmengine.fileio as fileio
import numpy as np
from mmcv.transforms import BaseTransform
from mmseg.datasets import BaseSegDataset
from mmseg.registry import DATASETS, TRANSFORMS
from rasterio.features import rasterize

from mapsage.base.files import parse_json

# A polygon's point further from the corner of the image than this, in pixels, is malformed.
_FARTHEST = 1e9


class _Instance(NamedTuple):
    """One annotation: its class index or the ignore index, outlines, and area in square pixels."""

    label: int
    rings: List[np.ndarray]
    area: float


@DATASETS.register_module()
class CocoPolygonDataset(BaseSegDataset):
    """Images with instance polygons in COCO JSON, used for semantic segmentation.

    * Format: ``images`` (id, file_name, width, height), ``categories`` (id, name), ``annotations``
      (image_id, category_id, ``segmentation`` as lists ``[x0, y0, x1, y1, ...]`` in pixels,
      optional ``iscrowd``). Run-length masks are refused; convert them to polygons first.
    * Classes: ``classes[0]`` is the class of pixels without a polygon; the others are matched with
      the JSON's categories **by name**, so ids and their order do not matter. A category that is
      not among the classes is an error.
    * Mask: uint8, value = class index, or the ignore index (255) where ``iscrowd`` is 1.
    * Overlap: larger instances are drawn first, so that small ones stay visible. Of instances with
      equal areas the one listed later is on top. Crowds are drawn before everything else.
    * Images without annotations are kept as background.

    The pipeline needs ``LoadPolygonAnnotations`` in place of ``LoadAnnotations``.

    Args:
        ann_file: Path of the JSON file, relative to ``data_root`` unless absolute.
        metainfo: Classes and colors, as ``dict(classes=..., palette=...)``; required unless a
            subclass has ``METAINFO``.
        **kwargs: Arguments of ``BaseSegDataset``; ``data_prefix=dict(img_path=...)`` is the folder
            of the images.

    Raises:
        ValueError: If a file is missing or breaks this format; the message gives the file, the id,
            the value and what to do.
    """

    def __init__(
        self, ann_file: str, metainfo: Optional[Dict[str, Any]] = None, **kwargs: Any
    ) -> None:
        super().__init__(ann_file=ann_file, metainfo=metainfo, **kwargs)

    def load_data_list(self) -> List[Dict[str, Any]]:
        """Return one entry per image, in the order of the file, with polygons in drawing order."""
        source = self._read()
        class_of = self._match_categories(source['categories'])
        instances: Dict[Union[int, str], List[_Instance]] = {}
        for image in source['images']:
            if image['id'] in instances:
                raise ValueError(
                    f'{self.ann_file}: two images have id {image["id"]}; '
                    'ids must be unique, renumber them'
                )
            instances[image['id']] = []
        sizes = {image['id']: (image['height'], image['width']) for image in source['images']}
        for annotation in source['annotations']:
            where = f'{self.ann_file}: annotation {annotation.get("id")}'
            image_id, category = annotation['image_id'], annotation['category_id']
            if image_id not in instances:
                raise ValueError(
                    f'{where} belongs to image {image_id}, which is not in "images"; '
                    'remove it or add the image'
                )
            where += f' of image {image_id}'
            if category not in class_of:
                raise ValueError(
                    f'{where} has category_id {category}, expected one of '
                    f'{sorted(class_of)}; correct it or add it to "categories"'
                )
            rings = _check_polygons(annotation.get('segmentation'), sizes[image_id], where)
            label = self.ignore_index if annotation.get('iscrowd') else class_of[category]
            instances[image_id].append(
                _Instance(label, rings, sum(abs(_signed_area(ring)) for ring in rings))
            )
        return [self._build_entry(image, instances[image['id']]) for image in source['images']]

    def _read(self) -> Dict[str, List[Dict[str, Any]]]:
        """Return the content of the JSON file, after a check of the fields that are used."""
        if not self.ann_file or not fileio.exists(self.ann_file, self.backend_args):
            raise ValueError(
                f'ann_file={self.ann_file!r} does not exist, expected COCO JSON; '
                f'check data_root={self.data_root!r}'
            )
        try:
            source = parse_json(fileio.get_text(self.ann_file, backend_args=self.backend_args))
        except ValueError as error:
            raise ValueError(
                f'{self.ann_file} is not valid JSON ({error}); it may be cut off, copy it again'
            ) from error
        identifier = (int, str)
        fields: Dict[str, Dict[str, Union[type, Tuple[type, ...]]]] = dict(
            images=dict(id=identifier, file_name=str, height=int, width=int),
            categories=dict(id=identifier, name=str),
            annotations=dict(image_id=identifier, category_id=identifier),
        )
        for key, types in fields.items():
            if not isinstance(source, dict) or not isinstance(source.get(key), list):
                raise ValueError(
                    f'{self.ann_file} has no list {key!r}; expected COCO JSON with {sorted(fields)}'
                )
            for index, item in enumerate(source[key]):
                item = item if isinstance(item, dict) else {}
                absent = [
                    name
                    for name, expected in types.items()
                    if not isinstance(item.get(name), expected)
                ]
                if absent:
                    raise ValueError(
                        f'{self.ann_file}: {key}[{index}] (id {item.get("id")}) lacks '
                        f'{absent}, or their values have another type; expected '
                        f'{list(types)}'
                    )
        return source

    def _match_categories(self, categories: Sequence[Dict[str, Any]]) -> Dict[Union[int, str], int]:
        """Return the class index of each category id.

        Raises:
            ValueError: If a category is not a class, or an id occurs twice.
        """
        classes = list(self.METAINFO.get('classes') or self._metainfo.get('classes') or ())
        if not classes:
            names = tuple(c['name'] for c in categories)
            raise ValueError(
                f'metainfo has no classes; set metainfo=dict(classes={("background", *names)})'
            )
        if len(classes) > 255:
            raise ValueError(
                f'metainfo has {len(classes)} classes, expected at most 255: masks '
                'are uint8, and 255 marks ignored pixels; join classes'
            )
        index = {name: i for i, name in enumerate(classes) if i > 0}
        for category in categories:
            if category['name'] not in index:
                raise ValueError(
                    f'{self.ann_file}: category {category["name"]!r} (id '
                    f'{category["id"]}) is not among the classes {classes[1:]}; '
                    'add it to metainfo or remove it from the file'
                )
        repeated = [k for k, n in Counter(c['id'] for c in categories).items() if n > 1]
        if repeated:
            raise ValueError(
                f'{self.ann_file}: category ids {repeated} occur twice; '
                'ids must be unique, renumber them'
            )
        return {category['id']: index[category['name']] for category in categories}

    def _build_entry(self, image: Dict[str, Any], instances: List[_Instance]) -> Dict[str, Any]:
        """Return the entry of an image, with crowds first and then larger instances first."""
        path = str(Path(self.data_prefix.get('img_path') or '') / image['file_name'])
        if not fileio.exists(path, self.backend_args):
            raise ValueError(
                f'{self.ann_file}: image {image["id"]} is {path}, which does not '
                f'exist; check data_prefix={self.data_prefix} and copy the image'
            )
        ordered = sorted(
            instances, key=lambda instance: (instance.label != self.ignore_index, -instance.area)
        )
        return dict(
            img_path=path,
            img_id=image['id'],
            mask_shape=(int(image['height']), int(image['width'])),
            polygons=[(instance.label, instance.rings) for instance in ordered],
            label_map=self.label_map,
            reduce_zero_label=self.reduce_zero_label,
            seg_fields=[],
        )


@DATASETS.register_module()
class NWPUPolygonDataset(CocoPolygonDataset):
    """NWPU VHR-10 with polygons: ten kinds of man-made objects in very-high-resolution images.

    * Source: 650 images with objects, crops of Google Earth (0.5 to 2 m) and of Vaihingen
      (0.08 m, infrared), JPEG, 500 to 1,100 pixels a side; instance masks added by Su et al. 2019.
    * Classes (mask value): background 0, then 1..10 as in ``METAINFO``; no ignored value.
    * Objects cover a few percent of the pixels.
    * Terms: for research only.
    """

    METAINFO: Dict[str, Any] = dict(
        classes=(
            'background',
            'airplane',
            'ship',
            'storage_tank',
            'baseball_diamond',
            'tennis_court',
            'basketball_court',
            'ground_track_field',
            'harbor',
            'bridge',
            'vehicle',
        ),
        palette=[
            [0, 0, 0],
            [230, 25, 75],
            [0, 130, 200],
            [255, 225, 25],
            [60, 180, 75],
            [245, 130, 48],
            [145, 30, 180],
            [170, 110, 40],
            [70, 240, 240],
            [128, 128, 128],
            [240, 50, 230],
        ],
    )


@TRANSFORMS.register_module()
class LoadPolygonAnnotations(BaseTransform):
    """Transform that draws polygons of ``CocoPolygonDataset`` into ``gt_seg_map``, uint8 (H, W).

    A pixel belongs to an instance if its center lies inside; pixel (0, 0) spans 0 to 1, as in
    pycocotools. Like MMSeg's ``LoadAnnotations`` it belongs before resizing in training and after
    resizing in testing.

    Required keys: ``polygons``, ``mask_shape``, ``label_map``, ``seg_fields``. Added:
    ``gt_seg_map``.
    """

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        """Add the mask to ``results``, and return them.

        Raises:
            ValueError: If the image does not have the size that the JSON gives.
        """
        shape: Tuple[int, int] = results['mask_shape']
        loaded = tuple(results.get('ori_shape', shape)[:2])
        if loaded != tuple(shape):
            raise ValueError(
                f'{results["img_path"]} (image {results["img_id"]}) is {loaded[0]} x '
                f'{loaded[1]} pixels (height x width), the JSON says {shape[0]} x '
                f'{shape[1]}; polygons would not fit, correct one of them'
            )
        mask = np.zeros(shape, np.uint8)
        # Overlapping rings of one geometry would cancel out, so each ring is a geometry.
        shapes = [
            (dict(type='Polygon', coordinates=[ring]), int(label))
            for label, rings in results['polygons']
            for ring in rings
        ]
        if shapes:
            rasterize(shapes, out=mask)
        if results['label_map'] is not None:
            lookup = np.arange(256, dtype=np.uint8)
            for old, new in results['label_map'].items():
                lookup[old] = new
            mask = lookup[mask]
        results['gt_seg_map'] = mask
        results['seg_fields'].append('gt_seg_map')
        return results


def _check_polygons(segmentation: object, shape: Tuple[int, int], where: str) -> List[np.ndarray]:
    """Return the outlines of one instance, each float64 (N, 2) of x and y.

    ``shape`` is (height, width) of the image; an error message begins with ``where``.

    Raises:
        ValueError: If the segmentation is not a list of polygons, or one lies outside the image.
    """
    if isinstance(segmentation, dict):
        raise ValueError(
            f'{where} is a run-length mask, expected polygons [[x0, y0, x1, y1, ...]]; '
            '`mapsage prepare coco EXPORT --out DIR` writes masks of both for BaseSegDataset'
        )
    if not isinstance(segmentation, list) or not segmentation:
        raise ValueError(
            f'{where} has segmentation {segmentation!r}, expected at least one '
            'polygon [[x0, y0, x1, y1, ...]]; draw it or remove the annotation'
        )
    rings = []
    for coordinates in segmentation:
        all_numbers = isinstance(coordinates, list) and all(
            isinstance(v, (int, float)) and abs(v) < _FARTHEST for v in coordinates
        )
        if not all_numbers or len(coordinates) < 6 or len(coordinates) % 2:
            raise ValueError(
                f'{where} has a malformed polygon {str(coordinates)[:80]}, expected 3 '
                'or more pairs of finite numbers [x0, y0, x1, y1, ...]; correct it'
            )
        points = np.array(coordinates, np.float64).reshape(-1, 2)
        low, high = points.min(0), points.max(0)
        if (high < 0).any() or low[0] >= shape[1] or low[1] >= shape[0]:
            raise ValueError(
                f'{where} has a polygon in x {low[0]:g}..{high[0]:g}, y {low[1]:g}..'
                f'{high[1]:g}, outside its image of {shape[1]} x {shape[0]} pixels '
                '(width x height); check the order of x and y'
            )
        rings.append(points)
    return rings


def _signed_area(points: np.ndarray) -> float:
    """Return the area of a ring (N, 2) in square pixels by the shoelace formula.

    The sign tells in which direction the points run around the ring.
    """
    x, y = points.T
    return float(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2
