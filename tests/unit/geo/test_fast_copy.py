"""Fast copies of rasters: the same pixels and everything that hides them, on any disk."""

from __future__ import annotations

import multiprocessing
import resource
import signal
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
import rasterio
from geo_scenes import damage_block, draw_classes, paint, write_mosaic, write_raster
from rasterio.control import GroundControlPoint
from rasterio.crs import CRS
from rasterio.enums import ColorInterp

from mapsage.geo import GeoError, NotCopiedError, Raster, RasterBlockError
from mapsage.geo.fast_copy import (
    decoded_bytes,
    estimate_copy_bytes,
    measure_read_times,
    write_fast_copy,
)

STRIPS = dict(tiled=False, blockxsize=512, blockysize=1, compress='lzw')


def write_scene(path: Path, kind: str) -> Path:
    """Write a scene of 300 x 260 pixels that has something special."""
    classes = draw_classes()
    values = paint(classes, 3)
    if kind == 'strips':
        return write_raster(path, values, **STRIPS)
    if kind == 'nodata':
        return write_raster(path, paint(classes, 4, 'uint16'), nodata=11)
    if kind == 'float':
        values = values.astype('float32')
        values[:, 30:90, 50:120] = np.nan
        return write_raster(path, values, nodata=float('nan'))
    if kind == 'nodata beyond the type':
        write_raster(path, values)
        path.with_suffix('.tif.aux.xml').write_text(
            '<PAMDataset>'
            + ''.join(
                f'<PAMRasterBand band="{band}"><NoDataValue>-9999</NoDataValue></PAMRasterBand>'
                for band in (1, 2, 3)
            )
            + '</PAMDataset>'
        )
        return path
    if kind == 'alpha':
        values = np.concatenate([values, np.where(classes[None] == 1, 0, 255).astype('uint8')])
        return write_raster(path, values, photometric='RGB', alpha='yes')
    if kind == 'mask':
        write_raster(path, values)
        with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=False), rasterio.open(path, 'r+') as file:
            file.write_mask(np.where(classes == 2, 0, 255).astype('uint8'))
        assert path.with_suffix('.tif.msk').exists()
        return path
    if kind == 'colors':
        write_raster(path, classes, nodata=255)
        with rasterio.open(path, 'r+') as file:
            file.write_colormap(1, {0: (1, 2, 3, 255), 1: (4, 5, 6, 255)})
        return path
    if kind == 'control points':
        write_raster(path, values, place={})
        with rasterio.open(path, 'r+') as file:
            file.gcps = (
                [
                    GroundControlPoint(row, column, column * 2.0, row * 3.0)
                    for row in (0, 260)
                    for column in (0, 300)
                ],
                CRS.from_epsg(32650),
            )
        return path
    assert kind == 'described'
    write_raster(path, values.astype('int16'))
    with rasterio.open(path, 'r+') as file:
        file.colorinterp = [ColorInterp.blue, ColorInterp.green, ColorInterp.red]
        file.descriptions, file.units = ('B2', None, 'B4'), ('m', 'm', 'm')
        file.scales, file.offsets = (1e-4, 1e-4, 1.0), (0.0, -0.1, 0.0)
    return path


def facts(path: Path) -> Any:
    """Return what rasterio says of a file, except how its pixels are stored."""
    with rasterio.open(path) as file:
        colors = file.colormap(1) if file.colorinterp[0] == ColorInterp.palette else None
        points, crs = file.gcps
        return (
            file.shape,
            file.dtypes,
            file.crs,
            file.transform,
            file.colorinterp,
            file.descriptions,
            file.scales,
            file.offsets,
            file.units,
            colors,
            crs,
            [(point.row, point.col, point.x, point.y) for point in points],
        )


KINDS = (
    'strips',
    'nodata',
    'float',
    'nodata beyond the type',
    'alpha',
    'mask',
    'colors',
    'control points',
    'described',
)


@pytest.mark.parametrize('kind', KINDS)
def test_a_copy_reads_like_the_raster(tmp_path: Path, kind: str) -> None:
    scene, copy = write_scene(tmp_path / 'scene.tif', kind), tmp_path / 'copy/scene.tif'
    copy.parent.mkdir()
    counts = []
    write_fast_copy(str(scene), copy, counts.append)
    assert sum(counts) == decoded_bytes(str(scene))
    with rasterio.open(copy) as file:
        assert file.block_shapes[0] == (256, 256) and file.compression.name == 'zstd'
    assert facts(copy) == facts(scene)
    count = len(facts(scene)[1])
    for bands in [None, *([band] for band in range(1, count + 1))]:
        with Raster(scene, bands) as first, Raster(copy, bands) as second:
            assert second.facts() == first.facts()
            # A window beyond two edges, too.
            for box in ((0, 0, 300, 260), (200, 150, 128, 128)):
                for read in ('read', 'read_with_nodata'):
                    expected, found = (getattr(raster, read)(*box) for raster in (first, second))
                    assert np.array_equal(found[1], expected[1])
                    assert found[0].tobytes() == expected[0].tobytes()


def test_pixels_that_are_hidden_are_copied_too(tmp_path: Path) -> None:
    scene, copy = write_scene(tmp_path / 'scene.tif', 'mask'), tmp_path / 'copy.tif'
    write_fast_copy(str(scene), copy)
    with rasterio.open(scene) as first, rasterio.open(copy) as second:
        assert second.read().tobytes() == first.read().tobytes()
        assert np.array_equal(second.dataset_mask(), first.dataset_mask())
    assert not list(tmp_path.glob('copy.tif.*'))


def test_a_mosaic_is_copied_as_one_file(tmp_path: Path) -> None:
    parts = [write_raster(tmp_path / f'{name}.tif', draw_classes()) for name in 'ab']
    mosaic = write_mosaic(tmp_path / 'mosaic.vrt', parts)
    write_fast_copy(str(mosaic), tmp_path / 'copy.tif')
    assert np.array_equal(
        Raster(tmp_path / 'copy.tif').read(0, 0, 600, 260)[0],
        Raster(mosaic).read(0, 0, 600, 260)[0],
    )


def test_what_a_geotiff_cannot_store_is_refused(tmp_path: Path) -> None:
    write_raster(tmp_path / 'scene.tif', paint(draw_classes(), 2))
    band = (
        '<VRTRasterBand dataType="{}" band="{}"><NoDataValue>{}</NoDataValue><SimpleSource>'
        '<SourceFilename relativeToVRT="1">scene.tif</SourceFilename>'
        '<SourceBand>{}</SourceBand></SimpleSource></VRTRasterBand>'
    )
    mosaic = tmp_path / 'mosaic.vrt'
    for kinds, nodata, reason in (
        (('Byte', 'UInt16'), (0, 0), 'its bands hold uint16, uint8'),
        (('Byte', 'Byte'), (0, 7), 'different no-data values'),
    ):
        mosaic.write_text(
            '<VRTDataset rasterXSize="300" rasterYSize="260">'
            + ''.join(band.format(kinds[i], i + 1, nodata[i], i + 1) for i in (0, 1))
            + '</VRTDataset>'
        )
        with pytest.raises(NotCopiedError, match=reason):
            write_fast_copy(str(mosaic), tmp_path / 'copy.tif')


def test_a_damaged_raster_is_named(tmp_path: Path) -> None:
    # Noise, because old versions of zlib decode flat colors that were overwritten.
    values = np.random.RandomState(0).randint(0, 200, (3, 260, 300)).astype('uint8')
    scene = write_raster(tmp_path / 'scene.tif', values)
    damage_block(scene, 1, 1, 1)
    with pytest.raises(RasterBlockError, match='scene.tif: the window .* damaged are 1 block'):
        write_fast_copy(str(scene), tmp_path / 'copy.tif')


def test_the_size_is_estimated(tmp_path: Path) -> None:
    values = np.random.RandomState(0).randint(0, 50, (3, 900, 1100)).astype('uint8')
    scene = write_raster(tmp_path / 'scene.tif', values)
    write_fast_copy(str(scene), tmp_path / 'copy.tif')
    size = (tmp_path / 'copy.tif').stat().st_size
    # The tiles at the edges are stored as whole tiles.
    assert size * 0.7 < estimate_copy_bytes(str(scene)) < size * 1.2


def test_reading_is_measured_both_ways(tmp_path: Path) -> None:
    values = np.random.RandomState(0).randint(0, 50, (3, 1500, 1500)).astype('uint8')
    times = measure_read_times(str(write_raster(tmp_path / 'scene.tif', values, **STRIPS)), 512)
    assert times.original > times.copy > 0 and not times.is_remote
    small = write_raster(tmp_path / 'small.tif', values[:, :40, :50])
    assert measure_read_times(str(small), 512).copy > 0


def _copy_to_a_full_disk(scene: str, sizes: List[int], errors: Any) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for size in sizes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        try:
            write_fast_copy(scene, Path(scene).with_name('copy.tif'))
            error = 'copied'
        except GeoError as caught:
            error = str(caught)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        errors.put(error)


def test_a_full_disk_is_an_error_wherever_it_fills_up(tmp_path: Path) -> None:
    noise = np.random.RandomState(0).randint(0, 255, (1, 450, 450)).astype('uint8')
    scene = write_raster(tmp_path / 'scene.tif', noise)
    write_fast_copy(str(scene), tmp_path / 'copy.tif')
    # Nothing fits, the first tiles do not, and the last bytes do not.
    sizes = [0, 3000, (tmp_path / 'copy.tif').stat().st_size - 100]
    fork = multiprocessing.get_context('fork')
    errors = fork.SimpleQueue()
    process = fork.Process(target=_copy_to_a_full_disk, args=(str(scene), sizes, errors))
    process.start()
    process.join()
    assert process.exitcode == 0
    for _ in sizes:
        error = errors.get()
        assert 'cannot write ' in error and 'free space there or write elsewhere' in error
