"""The layouts of LoveDA, Potsdam, Vaihingen and iSAID, as shipped and as MMSeg reads them.

A layout finds images and labels by regular expressions on paths, in which an archive counts as a
folder, so unpacked deliveries and shipped archives are treated alike. `LAYOUTS` is the table that
`archives.py` uses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from .source_files import PrepareError, SourceFile, nothing_found, select, some
from .tiling import Color


class SourceImage(NamedTuple):
    """An image of a delivery and its label; a test image may have no label."""

    split: str
    stem: str
    image: SourceFile
    label: Optional[SourceFile]


@dataclass(frozen=True)
class ArchiveLayout:
    """The layout of one dataset, as shipped and as written.

    Attributes:
        find: Function that lists the images among the files of a source folder.
        clip_size: Side of a tile in pixels; None to keep images whole.
        stride: Distance between tiles in pixels.
        colors: Mask value of each label color; empty if the labels are masks already.
        ignored: Mask value of ignored pixels: padding, and other colors where they are allowed.
        label_suffix: Suffix of a mask's name; an image has ``.png``.
        tile_name: Format of a tile's name, with stem, x0, y0, x1 and y1 (pixels, end excluded).
    """

    find: Callable[[Path, Sequence[SourceFile]], List[SourceImage]]
    clip_size: Optional[int] = None
    stride: Optional[int] = None
    colors: Tuple[Tuple[Color, int], ...] = ()
    ignored: int = 0
    label_suffix: str = '.png'
    tile_name: str = '{stem}_{x0}_{y0}_{x1}_{y1}'


# Value 0 is the black line between objects, which noBoundary and eroded labels have.
# Colors: ISPRS 2D semantic labeling contest, the same for both cities.
_ISPRS_COLORS: Tuple[Tuple[Color, int], ...] = (
    ((0, 0, 0), 0),
    # impervious surface
    ((255, 255, 255), 1),
    # building
    ((0, 0, 255), 2),
    # low vegetation
    ((0, 255, 255), 3),
    # tree
    ((0, 255, 0), 4),
    # car
    ((255, 255, 0), 5),
    # clutter
    ((255, 0, 0), 6),
)

# Colors of iSAID's semantic masks, in the order of iSAIDDataset's classes.
_ISAID_COLORS: Tuple[Tuple[Color, int], ...] = (
    ((0, 0, 0), 0),
    ((0, 0, 63), 1),
    ((0, 63, 63), 2),
    ((0, 63, 0), 3),
    ((0, 63, 127), 4),
    ((0, 63, 191), 5),
    ((0, 63, 255), 6),
    ((0, 127, 63), 7),
    ((0, 127, 127), 8),
    ((0, 0, 127), 9),
    ((0, 0, 191), 10),
    ((0, 0, 255), 11),
    ((0, 191, 127), 12),
    ((0, 127, 191), 13),
    ((0, 127, 255), 14),
    ((0, 100, 155), 15),
)

# The split of the contests: training areas, and test areas, whose labels were published later.
_POTSDAM = {
    'train': '2_10 2_11 2_12 3_10 3_11 3_12 4_10 4_11 4_12 5_10 5_11 5_12 6_7 6_8 6_9 6_10 6_11 '
    '6_12 7_7 7_8 7_9 7_10 7_11 7_12',
    'val': '2_13 2_14 3_13 3_14 4_13 4_14 4_15 5_13 5_14 5_15 6_13 6_14 6_15 7_13',
}
_VAIHINGEN = {
    'train': '1 3 5 7 11 13 15 17 21 23 26 28 30 32 34 37',
    'val': '2 4 6 8 10 12 14 16 20 22 24 27 29 31 33 35 38',
}


def _find_loveda(source: Path, files: Sequence[SourceFile]) -> List[SourceImage]:
    pattern = r'(?:^|/)(Train|Val|Test)(?:\.zip)?/(?:.*/)?(?:Urban|Rural)/{}/(\d+)\.png$'
    images = select(files, re.compile(pattern.format('images_png')))
    masks = select(files, re.compile(pattern.format('masks_png')))
    if not images:
        raise nothing_found(
            source,
            files,
            'Train.zip, Val.zip or Test.zip of LoveDA (Train/Urban/images_png/N.png and so on)',
        )
    _check_pairs(source, [k for k in images if k[0] != 'Test'], masks)
    return [
        SourceImage(split.lower(), number, image, masks.get((split, number)))
        for (split, number), image in sorted(images.items())
    ]


def _find_potsdam(source: Path, files: Sequence[SourceFile]) -> List[SourceImage]:
    # The archive for participants repeats files of the archive of all labels.
    originals = [file for file in files if 'for_participants' not in file.location]
    images = select(originals, re.compile(r'(?:^|/)top_potsdam_(\d+_\d+)_RGB\.tif$'))
    plain = select(originals, re.compile(r'(?:^|/)top_potsdam_(\d+_\d+)_label\.tif$'))
    eroded = select(originals, re.compile(r'(?:^|/)top_potsdam_(\d+_\d+)_label_noBoundary\.tif$'))
    labels = eroded or plain
    if not images or not labels:
        expected = (
            '2_Ortho_RGB.zip (top_potsdam_2_10_RGB.tif and so on)'
            if not images
            else (
                '5_Labels_all_noBoundary.zip or 5_Labels_all.zip (top_potsdam_2_10_label'
                '[_noBoundary].tif and so on)'
            )
        )
        raise nothing_found(source, files, expected)
    return _by_area(source, 'top_potsdam_{}_RGB.tif', _POTSDAM, '{}', images, labels)


def _find_vaihingen(source: Path, files: Sequence[SourceFile]) -> List[SourceImage]:
    # Labels in the folder gts_for_participants/ of the same archive have the names of the images.
    images = select(files, re.compile(r'(?:^|/)top/top_mosaic_09cm_area(\d+)\.tif$'))
    labels = select(files, re.compile(r'(?:^|/)top_mosaic_09cm_area(\d+)_noBoundary\.tif$'))
    if not images or not labels:
        expected = 'ISPRS_semantic_labeling_Vaihingen.zip (top/top_mosaic_09cm_area1.tif and so on)'
        if images:
            expected = (
                'ISPRS_semantic_labeling_Vaihingen_ground_truth_eroded_COMPLETE.zip '
                '(top_mosaic_09cm_area1_noBoundary.tif and so on)'
            )
        raise nothing_found(source, files, expected)
    return _by_area(source, 'top_mosaic_09cm_area{}.tif', _VAIHINGEN, 'area{}', images, labels)


def _find_isaid(source: Path, files: Sequence[SourceFile]) -> List[SourceImage]:
    images = select(files, re.compile(r'(?:^|/)(train|val|test)/images/(?:.*/)?(P\d+)\.png$'))
    labels = select(
        files,
        re.compile(r'(?:^|/)(train|val)/Semantic_masks/(?:.*/)?(P\d+)_instance_color_RGB\.png$'),
    )
    if not images:
        raise nothing_found(
            source, files, 'images of iSAID (train/images/part1.zip and so on: images/P0000.png)'
        )
    _check_pairs(source, [k for k in images if k[0] != 'test'], labels)
    return [
        SourceImage(split, stem, image, labels.get((split, stem)))
        for (split, stem), image in sorted(images.items())
    ]


def _by_area(
    source: Path,
    image_name: str,
    splits: Dict[str, str],
    stem: str,
    images: Dict[Tuple[str, ...], SourceFile],
    labels: Dict[Tuple[str, ...], SourceFile],
) -> List[SourceImage]:
    """Return the areas of both splits; areas that belong to neither are left out."""
    listed = [(split, (area,)) for split, areas in splits.items() for area in areas.split()]
    absent = [image_name.format(key[0]) for _, key in listed if key not in images]
    if absent:
        raise PrepareError(
            f'{source} lacks {len(absent)} of {len(listed)} images: {some(absent)}; '
            'the delivery is incomplete, download it again'
        )
    _check_pairs(source, [key for _, key in listed], labels)
    return [
        SourceImage(split, stem.format(key[0]), images[key], labels[key]) for split, key in listed
    ]


def _check_pairs(
    source: Path, keys: Sequence[Tuple[str, ...]], labels: Dict[Tuple[str, ...], SourceFile]
) -> None:
    """Raise an error if an image has no label."""
    absent = ['/'.join(key) for key in sorted(keys) if key not in labels]
    if absent:
        raise PrepareError(
            f'{source} has no label for {len(absent)} of {len(keys)} images: '
            f'{some(absent)}; the archive of the labels is missing or incomplete'
        )


LAYOUTS: Dict[str, ArchiveLayout] = {
    'loveda': ArchiveLayout(_find_loveda),
    # Adjacent tiles without overlap give the counts in MMSeg's documents, 3456 and 2016.
    'potsdam': ArchiveLayout(_find_potsdam, 512, 512, _ISPRS_COLORS),
    'vaihingen': ArchiveLayout(_find_vaihingen, 512, 512, _ISPRS_COLORS),
    'isaid': ArchiveLayout(
        _find_isaid,
        896,
        512,
        _ISAID_COLORS,
        255,
        '_instance_color_RGB.png',
        '{stem}_{y0}_{y1}_{x0}_{x1}',
    ),
}
