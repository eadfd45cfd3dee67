"""Exports of labeling tools as folders of PNG images and masks, for `docs/tutorials/own-folders.md`.

`coco_export.py` and `voc_export.py` read the exports and yield :class:`Sample`. This module divides the
samples into parts and writes ``images/PART/NAME.png`` and ``masks/PART/NAME.png``.

Masks: uint8 ``(H, W)``, class index, or 255 for no label.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import cv2
import numpy as np

from .source_files import PrepareError, SourceFile, some

IGNORED = 255
# What exports call the parts.
PART_NAMES = dict(
    train='train', training='train', val='val', valid='val', validation='val', test='test'
)
IMAGE_SUFFIXES = ('.png', '.jpg', '.jpeg', '.tif', '.tiff', '.bmp', '.webp')
# Roboflow writes several augmented copies of an image: NAME_jpg.rf.HASH.jpg.
_COPY = re.compile(r'\.rf\.[0-9A-Za-z]+$')


class Sample(NamedTuple):
    """An image of an export and its mask.

    Attributes:
        image: File of the image.
        part: Part that the export puts it into, or None.
        draw: Function that takes height and width of the image in pixels, and returns the mask.
    """

    image: SourceFile
    part: Optional[str]
    draw: Callable[[int, int], np.ndarray]


class Export(NamedTuple):
    """What an export holds.

    Attributes:
        classes: Names of the classes in the order of their indices.
        palette: RGB colors of the first classes, 0 to 255; others get default colors.
        samples: Images with labels.
        notes: Sentences about what was left out or changed.
    """

    classes: Tuple[str, ...]
    palette: Tuple[Tuple[int, int, int], ...]
    samples: Sequence[Sample]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Division:
    """How images are divided where the export does not do it.

    Attributes:
        val_share: Share of the places that become the part ``val``, 0 to 1.
        place: Pattern whose first group in the name of an image is its place; without a pattern
            each image is a place, and copies of one image that Roboflow made are one.
        seed: Another seed, another division.
    """

    val_share: float = 0.2
    place: Optional[str] = None
    seed: int = 0

    def place_of(self, name: str) -> str:
        """Return the place of an image without its suffix.

        Raises:
            PrepareError: If the pattern does not match.
        """
        if self.place is None:
            return _COPY.sub('', name)
        match = re.search(self.place, name)
        if match is None or not match.groups() or match.group(1) is None:
            raise PrepareError(
                f'--place {self.place!r} finds no place in the name {name!r}: expected a regular '
                f"expression whose first group is the place, such as '^(.+)_[0-9]+$'."
            )
        return match.group(1)

    def parts(self, names: Sequence[str]) -> Dict[str, str]:
        """Return the part of each name. All images of a place are in one part."""
        places = {self.place_of(name) for name in names}
        # A hash, so that new images do not move the others into another part.
        order = sorted(
            places, key=lambda place: hashlib.sha256(f'{self.seed}/{place}'.encode()).digest()
        )
        count = round(self.val_share * len(order))
        if len(order) > 1 and self.val_share > 0:
            count = min(max(count, 1), len(order) - 1)
        validation = set(order[:count])
        return {name: 'val' if self.place_of(name) in validation else 'train' for name in names}


@dataclass
class Written:
    """What was written.

    Attributes:
        images: Number of images in each part.
        pixels: Number of pixels of each value of the masks.
    """

    images: Counter = field(default_factory=Counter)
    pixels: np.ndarray = field(default_factory=lambda: np.zeros(256, np.int64))


def write_export(export: Export, out: Path, division: Division) -> Written:
    """Write the images and masks of an export.

    Raises:
        PrepareError: If there is no image, ``out`` holds files, or an image cannot be read.
        OSError: If a file cannot be written.
    """
    if not export.samples:
        raise PrepareError('the export has no image with labels.')
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PrepareError(f'{out} exists and is not empty: choose another --out, or remove it.')
    names = _unique_names([sample.image for sample in export.samples])
    undivided = [name for name, sample in zip(names, export.samples) if sample.part is None]
    parts, written = division.parts(undivided), Written()
    for name, sample in zip(names, export.samples):
        part = sample.part or parts[name]
        image = _read_image(sample.image)
        mask = sample.draw(*image.shape[:2])
        for kind, pixels in (('images', image), ('masks', mask)):
            path = out / kind / part / f'{name}.png'
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(cv2.imencode('.png', pixels)[1].tobytes())
        written.images[part] += 1
        written.pixels += np.bincount(mask.ravel(), minlength=256)
    return written


def find_image(name: str, files: Dict[str, List[SourceFile]], near: str) -> SourceFile:
    """Return the file of an image that an export names.

    Args:
        name: Name in the export, perhaps with folders of another machine.
        files: Images of the export by the last part of their names.
        near: Location of the file that names the image, whose folder comes first.

    Raises:
        PrepareError: If there is no such file, or several.
    """
    wanted = PurePosixPath(name.replace('\\', '/'))
    candidates = files.get(wanted.name, [])
    if len(candidates) > 1:
        folder = near.rpartition('/')[0]
        # The candidate whose last folders agree with the name in the export, else in its folder.
        candidates = [
            file for file in candidates if f'/{file.location}'.endswith(f'/{wanted.as_posix()}')
        ] or candidates
        candidates = [
            file for file in candidates if file.location.startswith(f'{folder}/' if folder else '')
        ] or candidates
    if len(candidates) != 1:
        raise PrepareError(
            f'{near} names the image {name}, of which the export has {len(candidates)}: expected '
            f'one file. Export the images with the labels, and give the folder that holds both.'
        )
    return candidates[0]


def images_by_name(files: Iterable[SourceFile]) -> Dict[str, List[SourceFile]]:
    """Return the images among files by the last part of their names."""
    images: Dict[str, List[SourceFile]] = {}
    for file in files:
        path = PurePosixPath(file.location)
        if path.suffix.lower() in IMAGE_SUFFIXES:
            images.setdefault(path.name, []).append(file)
    return images


def _unique_names(files: Sequence[SourceFile]) -> List[str]:
    """Return a name without suffix for each image; with its folders where two have the same."""
    stems = [PurePosixPath(file.location).stem for file in files]
    repeated = {stem for stem, count in Counter(stems).items() if count > 1}
    names = [
        '_'.join((*PurePosixPath(file.location).parts[:-1], stem)) if stem in repeated else stem
        for file, stem in zip(files, stems)
    ]
    double = sorted(name for name, count in Counter(names).items() if count > 1)
    if double:
        raise PrepareError(
            f'several images would be called {some(double)}: the labels name an image twice, or two '
            f'differ in their suffix only. Rename them.'
        )
    return names


def _read_image(file: SourceFile) -> np.ndarray:
    """Return an image as OpenCV reads it in color, ``(H, W, 3)`` uint8 in the order BGR."""
    # Labels are drawn on the stored pixels, whatever the camera says about its orientation.
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
    image = cv2.imdecode(np.frombuffer(file.read(), np.uint8), flags)
    if image is None:
        raise PrepareError(f'{file} is no image that can be read: export it again, or remove it.')
    return image
