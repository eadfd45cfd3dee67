"""Masks from the colored masks of Pascal VOC, as CVAT and others export them.

``labelmap.txt`` says which color is which class (CVAT: ``label:R,G,B:parts:actions``). Without it the
colors of Pascal VOC hold.
"""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Dict, List, Mapping, Optional, Tuple

import numpy as np
from PIL import Image

from .exports import IGNORED, PART_NAMES, Export, Sample, images_by_name
from .source_files import PrepareError, SourceFile, list_files, nothing_found, some

Color = Tuple[int, int, int]
# Pascal VOC 2012, in the order of its indices.
_VOC = (
    'background aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike '
    'person pottedplant sheep sofa train tvmonitor'
).split()
# The outline of objects in Pascal VOC, which is no class.
_BORDER: Color = (224, 224, 192)
_MASKS, _IMAGES, _LISTS = 'SegmentationClass', 'JPEGImages', 'ImageSets/Segmentation'


def read_voc(source: Path, ignore_other_colors: bool) -> Export:
    """Return the export in a folder or archive with ``SegmentationClass`` and ``JPEGImages``.

    Args:
        source: Folder or ``.zip``.
        ignore_other_colors: Whether colors that are no class are no label, instead of an error.

    Raises:
        PrepareError: If folders, a list's images or classes are missing.
    """
    files = list_files(source)
    masks = {
        PurePosixPath(file.location).stem: file
        for file in files
        if PurePosixPath(file.location).parent.name == _MASKS
    }
    if not masks:
        raise nothing_found(source, files, f'folder {_MASKS} of colored masks')
    colors = _read_colors(files) or {name: _voc_color(index) for index, name in enumerate(_VOC)}
    images = {
        PurePosixPath(name).stem: file
        for name, candidates in images_by_name(files).items()
        for file in candidates
        if PurePosixPath(file.location).parent.name == _IMAGES
    }
    missing = sorted(set(masks) - set(images))
    if missing:
        raise PrepareError(
            f'{len(missing)} mask(s) have no image in {_IMAGES}: {some(missing)}. In CVAT, export with '
            f'"Save images".'
        )
    parts = _read_lists(files)
    table = _table(colors)
    samples = [
        Sample(images[name], parts.get(name), partial(_draw, mask, table, ignore_other_colors))
        for name, mask in sorted(masks.items())
    ]
    without = sorted(set(images) - set(masks))
    notes = [f'{len(without)} image(s) without a mask are left out: {some(without)}'] * bool(
        without
    )
    return Export(tuple(colors), tuple(colors.values()), samples, notes)


def _read_colors(files: List[SourceFile]) -> Dict[str, Color]:
    """Return the color of each class in ``labelmap.txt``; empty without such a file."""
    colors: Dict[str, Color] = {}
    for file in files:
        if PurePosixPath(file.location).name != 'labelmap.txt':
            continue
        for line in file.read().decode('utf-8-sig').splitlines():
            if not line.strip() or line.startswith('#'):
                continue
            # A name may have a colon; the fields after the color have none.
            name, color = line.rsplit(':', 3)[:2] if line.count(':') >= 3 else (line, '')
            try:
                red, green, blue = (int(value) for value in color.split(','))
            except ValueError as error:
                raise PrepareError(
                    f'{file}: the line {line!r} is no class: expected NAME:RED,GREEN,BLUE::, as CVAT '
                    f'writes it.'
                ) from error
            colors[name] = (red, green, blue)
        return colors
    return colors


def _voc_color(index: int) -> Color:
    """Return the color of a class in Pascal VOC: the bits of its index, spread over the channels."""
    color = [0, 0, 0]
    for position in range(8):
        for channel in range(3):
            color[channel] |= (index >> (3 * position + channel) & 1) << (7 - position)
    return color[0], color[1], color[2]


def _read_lists(files: List[SourceFile]) -> Dict[str, str]:
    """Return the part of each image that a list of the export names."""
    parts: Dict[str, str] = {}
    for file in files:
        path = PurePosixPath(file.location)
        if not path.parent.as_posix().endswith(_LISTS) or path.suffix != '.txt':
            continue
        # Lists such as `default` and `trainval` do not divide.
        part: Optional[str] = PART_NAMES.get(path.stem.lower())
        for name in file.read().decode('utf-8-sig').split('\n') if part else ():
            if name.strip():
                parts[name.strip().rpartition('/')[2]] = str(part)
    return parts


def _table(colors: Mapping[str, Color]) -> np.ndarray:
    """Return the mask value of each color: uint16 ``(2**24,)``, 256 for a color of no class."""
    table = np.full(1 << 24, 256, np.uint16)
    table[_number(np.array(_BORDER))] = IGNORED
    for index, color in enumerate(colors.values()):
        table[_number(np.array(color))] = index
    return table


def _number(colors: np.ndarray) -> np.ndarray:
    colors = colors.astype(np.int64)
    return colors[..., 0] << 16 | colors[..., 1] << 8 | colors[..., 2]


def _draw(
    file: SourceFile, table: np.ndarray, ignore_other_colors: bool, height: int, width: int
) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(file.read())) as picture:
            colors = np.asarray(picture.convert('RGB'))
    except OSError as error:
        raise PrepareError(f'{file} is no image that can be read: export it again.') from error
    if colors.shape[:2] != (height, width):
        raise PrepareError(
            f'mask {file} has {colors.shape[1]} x {colors.shape[0]} pixels and its image {width} x '
            f'{height}; export images and masks in the same size.'
        )
    mask = table[_number(colors)]
    unknown = mask == 256
    if unknown.any() and not ignore_other_colors:
        red, green, blue = colors[unknown][0].tolist()
        raise PrepareError(
            f'mask {file} has the color {red},{green},{blue} in {int(unknown.sum())} pixel(s), which is no '
            f'class of labelmap.txt. Add the class there, or ignore such pixels with '
            f'--ignore-other-colors.'
        )
    return np.where(unknown, IGNORED, mask).astype(np.uint8)
