"""Masks from COCO JSON, as Roboflow, CVAT, Label Studio and others export it.

Annotations are polygons or run-length masks, both compressed and not. Pixels without an annotation
are class 0. Ignored instances are drawn
first, then larger before smaller ones, so that small ones stay visible.

Rings, (N, 2) float64: x and y in pixels; pixel (0, 0) spans 0 to 1, as in pycocotools.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

import numpy as np
import shapely
from rasterio.features import rasterize

from .exports import IGNORED, PART_NAMES, Export, Sample, find_image, images_by_name
from .source_files import PrepareError, list_files, nothing_found, some

Shape = Union[List[np.ndarray], np.ndarray]
"""Rings of polygons, or the counts of a run-length mask."""

# Light gray: most pixels of a picture are of no category, and the default colors are bright.
_BACKGROUND = (235, 235, 235)


class _Instance(NamedTuple):
    label: int
    shape: Shape
    # (height, width) of a run-length mask; None for polygons.
    size: Optional[Tuple[int, int]]
    where: str


def read_coco(source: Path, background: str, ignore_crowds: bool) -> Export:
    """Return the export in a folder or archive with one or several COCO JSON files.

    Args:
        source: Folder, ``.zip``, or the JSON file itself, beside whose folder the images are.
        background: Name of class 0. A category of this name is class 0 too.
        ignore_crowds: Whether annotations with ``iscrowd`` are no label. Otherwise they have their
            category: tools mark every mask as a crowd that they write as a run-length mask.

    Raises:
        PrepareError: If a file is no COCO JSON, or names what is not there.
    """
    root = source.parent if source.suffix.lower() == '.json' else source
    files = list_files(root)
    documents = [
        (file.location, document)
        for file in files
        if file.location.lower().endswith('.json') and (root is source or file.path == source)
        for document in [_parse(file.read(), str(file))]
        if {'images', 'annotations', 'categories'} <= set(document)
    ]
    if not documents:
        raise nothing_found(source, files, 'JSON file with images, annotations and categories')
    names, placeholders = _categories([document for _, document in documents], background)
    classes = (background, *names)
    if len(classes) > IGNORED:
        raise PrepareError(f'{len(classes)} classes, expected at most {IGNORED}: join categories.')
    images = images_by_name(files)
    samples: List[Sample] = []
    crowds = 0
    for location, document in documents:
        labels = {
            category['id']: classes.index(category['name'])
            for category in document['categories']
            if category.get('name') in classes
        }
        instances = _instances(document, labels, location, ignore_crowds)
        crowds += sum(bool(item.get('iscrowd')) for item in document['annotations'])
        part = _part_of(location) if len(documents) > 1 else None
        for image in document['images']:
            samples.append(
                Sample(
                    find_image(image['file_name'], images, location),
                    part,
                    partial(_draw, instances.get(image['id'], []), image, location),
                )
            )
    notes = [f'categories without an annotation are left out: {some(placeholders)}'] * bool(
        placeholders
    )
    if crowds:
        fate = 'are ignored' if ignore_crowds else 'have their category'
        notes.append(f'{crowds} annotation(s) with iscrowd=1 {fate}')
    return Export(classes, (_BACKGROUND,), samples, notes)


def _parse(content: bytes, name: str) -> Dict[str, Any]:
    try:
        document = json.loads(content.decode('utf-8-sig'))
    except ValueError as error:
        raise PrepareError(
            f'{name} is not valid JSON ({error}); it may be cut off, export it again.'
        ) from error
    return document if isinstance(document, dict) else {}


def _categories(
    documents: Sequence[Mapping[str, Any]], background: str
) -> Tuple[List[str], List[str]]:
    """Return the names of the classes in order, and the names that are left out.

    A placeholder is a category that no annotation uses and that is the supercategory of another:
    Roboflow adds one of the project's name.
    """
    names: List[str] = []
    used: Set[str] = set()
    parents: Set[str] = set()
    for document in documents:
        by_id = {
            category.get('id'): str(category.get('name')) for category in document['categories']
        }
        used |= {
            by_id[item['category_id']]
            for item in document['annotations']
            if item.get('category_id') in by_id
        }
        for category in document['categories']:
            parents.add(str(category.get('supercategory')))
            name = str(category.get('name'))
            if name not in names and name != background:
                names.append(name)
    placeholders = [name for name in names if name not in used and name in parents]
    return [name for name in names if name not in placeholders], placeholders


def _part_of(location: str) -> Optional[str]:
    """Return the part that the folder or the name of a JSON file says, or None."""
    path = PurePosixPath(location)
    words = [*path.parts[:-1], *path.stem.replace('-', '_').split('_')]
    parts = [PART_NAMES[word.lower()] for word in words if word.lower() in PART_NAMES]
    return parts[-1] if parts else None


def _instances(
    document: Mapping[str, Any], labels: Mapping[Any, int], location: str, ignore_crowds: bool
) -> Dict[Any, List[_Instance]]:
    """Return the instances of each image by its id."""
    sizes = {image['id']: image for image in document['images']}
    if len(sizes) < len(document['images']):
        (double, _), *_ = Counter(image['id'] for image in document['images']).most_common(1)
        raise PrepareError(f'{location}: two images have the id {double}; export it again.')
    instances: Dict[Any, List[_Instance]] = {}
    for item in document['annotations']:
        where = f'{location}: annotation {item.get("id")} of image {item.get("image_id")}'
        if item.get('image_id') not in sizes:
            raise PrepareError(f'{where}: the file has no image of this id; export it again.')
        if item.get('category_id') not in labels:
            raise PrepareError(
                f'{where} has category_id {item.get("category_id")!r}, expected one of '
                f'{sorted(map(str, labels))}; export it again.'
            )
        segmentation = item.get('segmentation')
        label = labels[item['category_id']]
        if item.get('iscrowd') and ignore_crowds:
            label = IGNORED
        instances.setdefault(item['image_id'], []).append(_instance(segmentation, label, where))
    return instances


def _instance(segmentation: Any, label: int, where: str) -> _Instance:
    if isinstance(segmentation, dict):
        size, counts = segmentation.get('size'), segmentation.get('counts')
        if isinstance(counts, str):
            counts = decode_counts(counts)
        if (
            isinstance(size, list)
            and len(size) == 2
            and isinstance(counts, list)
            and all(type(count) is int and count >= 0 for count in counts)
            and sum(counts) == size[0] * size[1]
        ):
            return _Instance(label, np.array(counts, np.int64), (size[0], size[1]), where)
        raise PrepareError(
            f'{where} has a run-length mask that does not fill its size {size}; export it again.'
        )
    rings = [
        np.array(ring, np.float64).reshape(-1, 2)
        for ring in (segmentation if isinstance(segmentation, list) else [])
        if isinstance(ring, list) and len(ring) >= 6 and not len(ring) % 2
    ]
    if not rings:
        raise PrepareError(
            f'{where} has no outline (segmentation {str(segmentation)[:60]}): boxes alone make no '
            f'mask. Draw polygons, or export as segmentation.'
        )
    return _Instance(label, rings, None, where)


def decode_counts(text: str) -> List[int]:
    """Return the counts of a compressed run-length mask.

    COCO's format: numbers of 5 bits in characters from ``0`` on, the sixth bit says that more
    follow, and from the fourth number on each is the difference to the last but one
    (``rleFrString`` in pycocotools' maskApi.c).
    """
    counts: List[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        value |= (bits & 0x1F) << shift
        shift += 5
        if bits & 0x20:
            continue
        if bits & 0x10:
            value -= 1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
        value = shift = 0
    return counts


def _draw(
    instances: Sequence[_Instance], image: Mapping[str, Any], location: str, height: int, width: int
) -> np.ndarray:
    """Return the mask of an image of this size."""
    stated = image.get('height', height), image.get('width', width)
    if stated != (height, width):
        raise PrepareError(
            f'{location}: image {image["file_name"]} has {width} x {height} pixels, and the file '
            f'says {stated[1]} x {stated[0]}; polygons would not fit. Export images and labels together.'
        )
    inside = [(instance, _pixels_of(instance, height, width)) for instance in instances]
    inside.sort(key=lambda pair: (pair[0].label != IGNORED, -int(pair[1].sum())))
    mask = np.zeros((height, width), np.uint8)
    for instance, pixels in inside:
        mask[pixels] = instance.label
    return mask


def _pixels_of(instance: _Instance, height: int, width: int) -> np.ndarray:
    """Return the pixels of an instance, bool ``(height, width)``."""
    if instance.size is not None:
        if instance.size != (height, width):
            raise PrepareError(
                f'{instance.where} has a mask of {instance.size[1]} x {instance.size[0]} pixels, its '
                f'image {width} x {height}; export images and labels together.'
            )
        values = np.arange(len(instance.shape)) % 2 == 1
        # Columns one after the other.
        return np.repeat(values, instance.shape).reshape(width, height).T
    shapes = [(shape, 1) for shape in _polygons(list(instance.shape)) if not shape.is_empty]
    if not shapes:
        return np.zeros((height, width), bool)
    return rasterize(shapes, out_shape=(height, width)).astype(bool)


def _polygons(rings: List[np.ndarray]) -> List[Any]:
    """Return the polygons of rings. A ring inside of another one is a hole in it."""
    shapes = sorted(
        (shapely.make_valid(shapely.Polygon(ring)) for ring in rings), key=lambda shape: -shape.area
    )
    union: List[Any] = []
    for shape in shapes:
        for index, outer in enumerate(union):
            if outer.contains(shape):
                union[index] = outer.difference(shape)
                break
        else:
            union.append(shape)
    return union
