"""The layouts of the supported deliveries."""

from __future__ import annotations

from pathlib import Path
from typing import List

import pytest

from mapsage.extras.demo.prepare.layouts import LAYOUTS
from mapsage.extras.demo.prepare.source_files import PrepareError, SourceFile

SOURCE = Path('delivery')


def _files(*places: str) -> List[SourceFile]:
    return [SourceFile(SOURCE / place, None, place) for place in places]


def _vaihingen(areas: range) -> List[SourceFile]:
    return _files(
        *(f'top/top_mosaic_09cm_area{area}.tif' for area in areas),
        *(f'complete/top_mosaic_09cm_area{area}_noBoundary.tif' for area in areas),
    )


def test_the_areas_of_vaihingen_are_split_as_in_the_contest() -> None:
    found = LAYOUTS['vaihingen'].find(SOURCE, _vaihingen(range(1, 39)))
    splits = [item.split for item in found]
    assert (splits.count('train'), splits.count('val')) == (16, 17)
    assert len({item.stem for item in found}) == 33  # no area is in both, 9 and others in neither
    assert 'area9' not in {item.stem for item in found}
    assert found[0].stem == 'area1' and found[0].label is not None
    assert found[0].label.location == 'complete/top_mosaic_09cm_area1_noBoundary.tif'


def test_an_incomplete_delivery_names_what_it_lacks() -> None:
    files = _vaihingen(range(1, 39))
    with pytest.raises(PrepareError, match='lacks 1 of 33 images: top_mosaic_09cm_area38.tif'):
        LAYOUTS['vaihingen'].find(
            SOURCE, [f for f in files if not f.location.endswith('area38.tif')]
        )
    with pytest.raises(PrepareError, match='no label for 1 of 33 images: 38;'):
        LAYOUTS['vaihingen'].find(SOURCE, [f for f in files if 'area38_no' not in f.location])


def test_only_test_images_of_loveda_may_have_no_label() -> None:
    images = ['Train.zip/Train/Urban/images_png/7.png', 'Test/Rural/images_png/9.png']
    label = 'Train.zip/Train/Urban/masks_png/7.png'
    found = LAYOUTS['loveda'].find(SOURCE, _files(*images, label))
    assert [(item.split, item.stem, item.label is None) for item in found] == [
        ('test', '9', True),
        ('train', '7', False),
    ]
    with pytest.raises(PrepareError, match='no label for 1 of 1 images: Train/7'):
        LAYOUTS['loveda'].find(SOURCE, _files(*images))
