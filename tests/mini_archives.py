"""Deliveries of LoveDA, Potsdam, Vaihingen and iSAID in their true form, at a few pixels a side.

Each writer returns the class map drawn for every image, as MMSeg's class should read it: uint8
class indices, 255 where ignored. Names, folders and colors are the providers'.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Dict, Sequence, Tuple

import numpy as np
import rasterio
from PIL import Image

# The contest's colors in the order of its classes, from its description, not from our table.
ISPRS = [(255, 255, 255), (0, 0, 255), (0, 255, 255), (0, 255, 0), (255, 255, 0), (255, 0, 0)]

# iSAID's: the development kit's order, with the background first.
ISAID = [
    (0, 0, 0),
    (0, 0, 63),
    (0, 63, 63),
    (0, 63, 0),
    (0, 63, 127),
    (0, 63, 191),
    (0, 63, 255),
    (0, 127, 63),
    (0, 127, 127),
    (0, 0, 127),
    (0, 0, 191),
    (0, 0, 255),
    (0, 191, 127),
    (0, 127, 191),
    (0, 127, 255),
    (0, 100, 155),
]

POTSDAM_TRAIN = [
    f'{row}_{column}'
    for row, columns in (
        (2, (10, 11, 12)),
        (3, (10, 11, 12)),
        (4, (10, 11, 12)),
        (5, (10, 11, 12)),
        (6, (7, 8, 9, 10, 11, 12)),
        (7, (7, 8, 9, 10, 11, 12)),
    )
    for column in columns
]
POTSDAM_VAL = [
    '2_13',
    '2_14',
    '3_13',
    '3_14',
    '4_13',
    '4_14',
    '4_15',
    '5_13',
    '5_14',
    '5_15',
    '6_13',
    '6_14',
    '6_15',
    '7_13',
]
VAIHINGEN_TRAIN = [1, 3, 5, 7, 11, 13, 15, 17, 21, 23, 26, 28, 30, 32, 34, 37]
VAIHINGEN_VAL = [2, 4, 6, 8, 10, 12, 14, 16, 20, 22, 24, 27, 29, 31, 33, 35, 38]

Maps = Dict[str, Dict[str, np.ndarray]]  # split, then the image's name


def draw(seed: int, width: int, height: int, classes: int) -> Tuple[np.ndarray, np.ndarray]:
    """An image, uint8 RGB, and its class map with blocks of every class and some ignored (255)."""
    random = np.random.RandomState(seed)
    blocks = np.arange(-(-height // 4) * -(-width // 4)) % (classes + 1)
    random.shuffle(blocks)
    grid = blocks.reshape(-(-height // 4), -1).repeat(4, 0).repeat(4, 1)[:height, :width]
    image = random.randint(0, 256, (height, width, 3)).astype(np.uint8)
    return image, np.where(grid == classes, 255, grid).astype(np.uint8)


def png(pixels: np.ndarray) -> bytes:
    """Encode uint8 (H, W) or RGB(A)."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, 'png')
    return buffer.getvalue()


def tif(pixels: np.ndarray) -> bytes:
    """A striped TIFF of RGB, as ISPRS ships them."""
    with rasterio.io.MemoryFile() as memory:
        with memory.open(
            driver='GTiff',
            width=pixels.shape[1],
            height=pixels.shape[0],
            count=3,
            dtype='uint8',
            photometric='RGB',
        ) as file:
            file.write(pixels.transpose(2, 0, 1))
        return bytes(memory.read())


def paint(mask: np.ndarray, colors: Sequence[Tuple[int, int, int]]) -> np.ndarray:
    """The label picture of a class map; what is ignored is black."""
    table = np.zeros((256, 3), np.uint8)
    table[: len(colors)] = colors
    return table[mask]


def write_zip(path: Path, members: Dict[str, bytes]) -> None:
    """Write an archive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(str(path), 'w', zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def write_loveda(root: Path) -> Maps:
    """Train.zip, Val.zip and Test.zip; masks hold 0 (no data) and 1..7."""
    maps: Maps = {'train': {}, 'val': {}}
    number = 0
    for split in ('Train', 'Val', 'Test'):
        members = {}
        for area in ('Rural', 'Urban'):
            for _ in range(2):
                image, mask = draw(number, 32, 32, 7)
                members[f'{split}/{area}/images_png/{number}.png'] = png(image)
                if split != 'Test':
                    stored = np.where(mask == 255, 0, mask + 1).astype(np.uint8)
                    members[f'{split}/{area}/masks_png/{number}.png'] = png(stored)
                    maps[split.lower()][f'{number}'] = mask
                number += 1
        write_zip(root / f'{split}.zip', members)
    return maps


def write_potsdam(root: Path, size: int = 40) -> Maps:
    """2_Ortho_RGB.zip (in a folder) and 5_Labels_all_noBoundary.zip (flat), as shipped."""
    maps: Maps = {'train': {}, 'val': {}}
    images, labels = {}, {}
    for split, areas in (('train', POTSDAM_TRAIN), ('val', POTSDAM_VAL)):
        for area in areas:
            image, mask = draw(len(images), size, size, 6)
            images[f'2_Ortho_RGB/top_potsdam_{area}_RGB.tif'] = tif(image)
            images[f'2_Ortho_RGB/top_potsdam_{area}_RGB.tfw'] = b'0.05\n'
            labels[f'top_potsdam_{area}_label_noBoundary.tif'] = tif(paint(mask, ISPRS))
            maps[split][area] = mask
    write_zip(root / '2_Ortho_RGB.zip', images)
    write_zip(root / '5_Labels_all_noBoundary.zip', labels)
    return maps


def write_vaihingen(root: Path) -> Maps:
    """The contest's archive, with labels under the names of the images, and the eroded labels."""
    maps: Maps = {'train': {}, 'val': {}}
    top, eroded = {}, {}
    for split, areas in (('train', VAIHINGEN_TRAIN), ('val', VAIHINGEN_VAL)):
        for area in areas:
            image, mask = draw(area, 44, 36, 6)
            name = f'top_mosaic_09cm_area{area}'
            top[f'top/{name}.tif'] = tif(image)
            if split == 'train':
                top[f'gts_for_participants/{name}.tif'] = tif(paint(mask, ISPRS))
            eroded[f'{name}_noBoundary.tif'] = tif(paint(mask, ISPRS))
            maps[split][f'area{area}'] = mask
    name = 'ISPRS_semantic_labeling_Vaihingen'
    write_zip(root / f'{name}.zip', top)
    write_zip(root / f'{name}_ground_truth_eroded_COMPLETE.zip', eroded)
    return maps


def write_isaid(root: Path) -> Maps:
    """DOTA's images, one of them gray and one with alpha, and iSAID's colored masks."""
    maps: Maps = {'train': {}, 'val': {}}
    number = 0
    for split in ('train', 'val', 'test'):
        images, labels = {}, {}
        for kind in ('rgb', 'gray', 'alpha'):
            width, height = (70, 50) if kind == 'rgb' else (30, 60)
            image, mask = draw(number, width, height, 16)
            mask = np.where(mask == 255, 0, mask)  # its masks ignore nothing
            if kind == 'gray':
                stored = image[..., 0]
            elif kind == 'alpha':
                stored = np.dstack([image, np.full_like(mask, 255)])
            else:
                stored = image
            images[f'images/P{number:04}.png'] = png(stored)
            if split != 'test':
                labels[f'images/P{number:04}_instance_color_RGB.png'] = png(paint(mask, ISAID))
                maps[split][f'P{number:04}'] = mask
            number += 1
        write_zip(root / split / 'images' / 'part1.zip', images)
        if labels:
            write_zip(root / split / 'Semantic_masks' / 'images.zip', labels)
    return maps
