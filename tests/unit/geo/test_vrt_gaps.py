"""Ground that no source of a VRT shows is invalid, in any VRT; compared with GDAL's pixels."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, Optional, Sequence, Tuple

import numpy as np
import pytest
import rasterio
import rasterio.shutil
from geo_scenes import GDAL, UTM, write_raster
from hypothesis import given, settings
from hypothesis import strategies as st
from rasterio.transform import Affine
from rasterio.vrt import WarpedVRT

from mapsage.geo import (
    Mosaic,
    NotCopiedError,
    Raster,
    RasterLabels,
    band_statistics,
    write_fast_copy,
)

# Size of the source and of the VRTs, in pixels.
WIDTH, HEIGHT, VRT_WIDTH, VRT_HEIGHT = 20, 16, 30, 24

Rectangle = Optional[Tuple[float, float, float, float]]


def write_source(path: Path, value: int = 7, **options: Any) -> Path:
    return write_raster(path, np.full((1, HEIGHT, WIDTH), value, np.uint8), **options)


def rectangle(name: str, sides: Rectangle) -> str:
    if sides is None:
        return ''
    return f'<{name} xOff="{sides[0]}" yOff="{sides[1]}" xSize="{sides[2]}" ySize="{sides[3]}"/>'


def source_of(
    name: str, shown: Rectangle, target: Rectangle, more: str = '', kind: str = 'SimpleSource'
) -> str:
    return (
        f'<{kind}><SourceFilename relativeToVRT="1">{name}</SourceFilename>'
        f'<SourceBand>1</SourceBand>{rectangle("SrcRect", shown)}'
        f'{rectangle("DstRect", target)}{more}</{kind}>'
    )


def write_vrt(path: Path, sources: Sequence[str], head: str = '', tail: str = '') -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f'<VRTDataset rasterXSize="{VRT_WIDTH}" rasterYSize="{VRT_HEIGHT}">'
        f'<SRS>{UTM["crs"].to_wkt()}</SRS><GeoTransform>500000,0.5,0,4100000,0,-0.5</GeoTransform>'
        f'<VRTRasterBand dataType="Byte" band="1">{head}{"".join(sources)}</VRTRasterBand>{tail}'
        f'</VRTDataset>'
    )
    return path


def shown_by_gdal(path: Any) -> np.ndarray:
    """Return where a VRT whose sources have no 0 is not 0."""
    with rasterio.open(str(path)) as file:
        return file.read(1) != 0


def read_valid(path: Any) -> np.ndarray:
    raster = Raster(path)
    values, valid = raster.read(0, 0, raster.width, raster.height)
    assert not values[:, ~valid].any()
    return valid


WHOLE = (0, 0, WIDTH, HEIGHT)


@pytest.fixture(scope='module')
def folder(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp('gaps')
    write_source(path / 'a.tif')
    return path


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            *[st.floats(-6, 12)] * 2,
            *[st.floats(1, 25)] * 2,
            *[st.floats(-4, 26)] * 2,
            *[st.floats(1, 20)] * 2,
        ),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
def test_gaps_are_where_gdal_shows_nothing(folder: Path, sources: Any, whole: bool) -> None:
    """Resampled, overlapping sources, beyond the VRT and beyond the file; fractions of pixels."""
    texts = []
    for values in sources:
        # Eighths of a pixel are none of GDAL's thousandths, at which edges are rounded. GDAL 3.9
        # rounds edges within pixels in another way.
        whole = whole or GDAL < (3, 10)
        values = [round(value) if whole else round(value * 8) / 8 for value in values]
        texts.append(source_of('a.tif', tuple(values[:4]), tuple(values[4:])))
    path = write_vrt(folder / 'm.vrt', texts)
    np.testing.assert_array_equal(read_valid(path), shown_by_gdal(path))


def test_a_gap_is_no_data_in_every_reader(folder: Path) -> None:
    path = write_vrt(folder / 'm.vrt', [source_of('a.tif', WHOLE, (0, 0, WIDTH, HEIGHT))])
    raster, expected = Raster(path), np.zeros((VRT_HEIGHT, VRT_WIDTH), bool)
    expected[:HEIGHT, :WIDTH] = True
    assert raster.may_have_gaps and raster.facts()['validity']['gaps']
    np.testing.assert_array_equal(raster.read(-5, 3, 30, 10)[1][:, 5:], expected[3:13, :25])
    np.testing.assert_array_equal(raster.read_reduced(2)[1], expected[::2, ::2])
    np.testing.assert_array_equal(raster.read_with_nodata(0, 0, VRT_WIDTH, VRT_HEIGHT)[1], expected)
    labels = RasterLabels(path, raster, None)
    np.testing.assert_array_equal(labels.read(0, 0, VRT_WIDTH, VRT_HEIGHT)[1], expected)
    assert band_statistics([str(path)]).mean[0] == 7
    below = write_raster(folder / 'b.tif', np.full((VRT_HEIGHT, VRT_WIDTH), 3, np.uint8))
    values, valid = Mosaic([path, below]).read(0, 0, VRT_WIDTH, VRT_HEIGHT)
    assert valid.all()
    np.testing.assert_array_equal(values[0], np.where(expected, 7, 3))
    with pytest.raises(NotCopiedError, match='its sources leave gaps'):
        write_fast_copy(str(path), folder / 'copy.tif')


def test_a_vrt_without_gaps_is_a_plain_raster(folder: Path) -> None:
    """Of tiles, and of one source that is larger than the VRT."""
    tiles = [source_of('a.tif', (0, 0, 15, 12), (x, y, 15, 12)) for x in (0, 15) for y in (0, 12)]
    for sources in (tiles, [source_of('a.tif', WHOLE, (-1, -1, 40, 30))]):
        raster = Raster(write_vrt(folder / 'm.vrt', sources))
        assert not raster.may_have_gaps and 'gaps' not in raster.facts()['validity']


def test_gaps_of_a_vrt_in_a_vrt(folder: Path) -> None:
    """With no-data, which the outer VRT takes as a value; enlarged, and in another folder."""
    write_vrt(
        folder / 'in/inner.vrt',
        [source_of('../a.tif', WHOLE, (10, 8, 20, 16))],
        '<NoDataValue>0</NoDataValue>',
    )
    outer = write_vrt(
        folder / 'outer.vrt', [source_of('in/inner.vrt', (5, 0, 25, 24), (1, 2, 20, 22))]
    )
    valid = read_valid(outer)
    assert 0 < valid.sum() < valid.size
    np.testing.assert_array_equal(valid, shown_by_gdal(outer))


@pytest.mark.parametrize('part', ['<NODATA>255</NODATA>', '<UseMaskBand>true</UseMaskBand>'])
def test_what_a_source_hides_is_a_gap(part: str, folder: Path) -> None:
    values = np.full((1, HEIGHT, WIDTH), 7, np.uint8)
    values[:, 3:9, 5:12] = 255
    write_raster(folder / 'holes.tif', values, nodata=255)
    for head in ('', '<NoDataValue>0</NoDataValue>'):
        path = write_vrt(
            folder / 'm.vrt',
            [source_of('holes.tif', WHOLE, (4, 3, WIDTH, HEIGHT), part, 'ComplexSource')],
            head,
        )
        np.testing.assert_array_equal(read_valid(path), shown_by_gdal(path))
        assert read_valid(path).sum() == WIDTH * HEIGHT - 42


@pytest.mark.parametrize('options', [{}, dict(add_alpha=True), dict(nodata=0)])
def test_ground_outside_a_warp_is_a_gap(options: Any, folder: Path) -> None:
    """The corners of a rotated source, also where the warped VRT is a source of another one."""
    turned = write_source(
        folder / 'turned.tif',
        place=dict(crs=UTM['crs'], transform=UTM['transform'] * Affine.rotation(30)),
    )
    with rasterio.open(turned) as file, WarpedVRT(file, **options) as warped:
        rasterio.shutil.copy(warped, str(folder / 'w.vrt'), driver='VRT')
        size = (0, 0, warped.width, warped.height)
    valid = read_valid(folder / 'w.vrt')
    assert 0.4 * valid.size < valid.sum() < 0.8 * valid.size
    np.testing.assert_array_equal(valid, shown_by_gdal(folder / 'w.vrt'))
    outer = write_vrt(folder / 'm.vrt', [source_of('w.vrt', size, (2, 1, *size[2:]))])
    np.testing.assert_array_equal(read_valid(outer), shown_by_gdal(outer))


def test_a_mask_of_the_vrt_hides_as_well(folder: Path) -> None:
    write_source(folder / 'mask.tif', 255)
    path = write_vrt(
        folder / 'm.vrt',
        [source_of('a.tif', WHOLE, (0, 0, WIDTH, HEIGHT))],
        tail=(
            '<MaskBand><VRTRasterBand dataType="Byte">'
            + source_of('mask.tif', WHOLE, (5, 0, WIDTH, HEIGHT))
            + '</VRTRasterBand></MaskBand>'
        ),
    )
    expected = np.zeros((VRT_HEIGHT, VRT_WIDTH), bool)
    expected[:HEIGHT, 5:WIDTH] = True
    np.testing.assert_array_equal(read_valid(path), expected)


def test_names_that_are_no_paths(folder: Path) -> None:
    path = write_vrt(folder / 'm.vrt', [source_of('a.tif', WHOLE, (3, 2, WIDTH, HEIGHT))])
    with zipfile.ZipFile(str(folder / 'z.zip'), 'w') as archive:
        archive.write(str(path), 'in/m.vrt')
        archive.write(str(folder / 'a.tif'), 'in/a.tif')
    for name in (
        f'/vsizip/{folder}/z.zip/in/m.vrt',
        f'zip://{folder}/z.zip!in/m.vrt',
        f'vrt://{path}?bands=1,1',
    ):
        np.testing.assert_array_equal(read_valid(name), shown_by_gdal(path))


def test_a_pixel_is_in_a_gap_where_no_band_shows_it(folder: Path) -> None:
    path = write_vrt(
        folder / 'm.vrt',
        [source_of('a.tif', WHOLE, (0, 0, WIDTH, HEIGHT))],
        tail=(
            '<VRTRasterBand dataType="Byte" band="2">'
            + source_of('a.tif', WHOLE, (5, 4, WIDTH, HEIGHT))
            + '</VRTRasterBand>'
        ),
    )
    with rasterio.open(path) as file:
        values = file.read()
    np.testing.assert_array_equal(read_valid(path), (values != 0).any(0))
    np.testing.assert_array_equal(
        Raster(path, [2]).read(0, 0, VRT_WIDTH, VRT_HEIGHT)[1], values[1] != 0
    )
