"""Small scenes with known shapes, written as GeoTIFF."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple
from xml.sax.saxutils import escape

import numpy as np
import pyogrio.raw
import rasterio
import shapely
from rasterio.crs import CRS
from rasterio.transform import from_origin

from mapsage.geo import write_polygons
from mapsage.geo.gdal_files import open_file

GDAL = tuple(map(int, rasterio.__gdal_version__.split('.')[:2]))

# Pixels of 0.5 m at 37 degrees north, and of an arc second at 60 degrees.
UTM = dict(crs=CRS.from_epsg(32650), transform=from_origin(500000.0, 4100000.0, 0.5, 0.5))
DEGREES = dict(crs=CRS.from_epsg(4326), transform=from_origin(10.0, 60.0, 1 / 3600, 1 / 3600))
PIXELS: dict = dict(crs=None, transform=None)

CLASSES = ('ground', 'house', 'water')
PALETTE = [[120, 160, 90], [200, 60, 40], [40, 90, 200]]


def draw_classes(width: int = 300, height: int = 260) -> np.ndarray:
    """Return uint8 (height, width): two houses of 40 x 30 and 5 x 7 pixels, and a round pond."""
    classes = np.zeros((height, width), np.uint8)
    classes[20:50, 30:70] = 1
    classes[100:107, 200:205] = 1
    rows, columns = np.mgrid[:height, :width]
    classes[(rows - 180) ** 2 + (columns - 120) ** 2 < 50**2] = 2
    return classes


def paint(classes: np.ndarray, bands: int = 3, dtype: Any = 'uint8') -> np.ndarray:
    """Return (bands, height, width): values that tell the classes apart, with some noise."""
    random = np.random.RandomState(0)
    base = np.arange(1, bands + 1)[:, None, None] * 10 + classes[None] * 50
    return (base + random.randint(0, 10, (bands, *classes.shape))).astype(dtype)


def write_raster(path: Path, values: np.ndarray, place: dict = UTM, **profile: Any) -> Path:
    """Write (bands, height, width) or (height, width) as a tiled, deflated GeoTIFF."""
    values = values if values.ndim == 3 else values[None]
    bands, height, width = values.shape
    defaults = dict(driver='GTiff', tiled=True, blockxsize=64, blockysize=64, compress='deflate')
    given = {key: value for key, value in place.items() if value is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_file(
        path,
        'w',
        count=bands,
        height=height,
        width=width,
        dtype=values.dtype,
        **{**defaults, **given, **profile},
    ) as file:
        file.write(values)
    return path


def write_mosaic(path: Path, sources: Sequence[Path]) -> Path:
    """Write a VRT of one band that puts rasters of one size side by side, the first at the left."""
    with open_file(sources[0]) as first:
        width, height, transform = first.width, first.height, first.transform.to_gdal()
        kind = {'uint8': 'Byte', 'uint16': 'UInt16', 'float32': 'Float32'}[first.dtypes[0]]
        crs = first.crs.to_wkt() if first.crs else ''
    size = f'xSize="{width}" ySize="{height}"'
    bands = ''.join(
        f'<SimpleSource><SourceFilename relativeToVRT="1">'
        f'{os.path.relpath(str(source), str(path.parent))}</SourceFilename><SourceBand>1'
        f'</SourceBand><SrcRect xOff="0" yOff="0" {size}/>'
        f'<DstRect xOff="{number * width}" yOff="0" {size}/></SimpleSource>'
        for number, source in enumerate(sources)
    )
    path.write_text(
        f'<VRTDataset rasterXSize="{width * len(sources)}" rasterYSize="{height}">'
        f'<SRS>{escape(crs)}</SRS><GeoTransform>{", ".join(map(str, transform))}</GeoTransform>'
        f'<VRTRasterBand dataType="{kind}" band="1">{bands}</VRTRasterBand></VRTDataset>'
    )
    return path


def damage_block(path: Path, band: int, column: int, row: int) -> None:
    """Overwrite part of a compressed block, given by its place among the blocks."""
    with rasterio.open(path) as file:
        offset, size = (
            int(file.get_tag_item(f'BLOCK_{what}_{column}_{row}', 'TIFF', bidx=band))
            for what in ('OFFSET', 'SIZE')
        )
    with open(path, 'r+b') as file:
        file.seek(offset + size // 3)
        file.write(b'\x5a' * (size // 3))


def rectangle(place: dict, left: int, top: int, right: int, bottom: int) -> shapely.Polygon:
    """Return the polygon of a block of pixels in the coordinates of a scene."""
    corners: Sequence[Tuple[int, int]] = [
        (left, top),
        (right, top),
        (right, bottom),
        (left, bottom),
    ]
    a, b, c, d, e, f = place['transform'][:6]
    return shapely.Polygon([(a * x + b * y + c, d * x + e * y + f) for x, y in corners])


def count_open_files(path: Path) -> int:
    """Return how often this process has ``path`` open."""
    return len(open_file_positions(path))


def open_file_positions(path: Path) -> List[str]:
    """Return where each of this process's open files of ``path`` stands."""
    return [
        (Path('/proc/self/fdinfo') / link.name).read_text().split('\n', 1)[0]
        for link in Path('/proc/self/fd').iterdir()
        if os.path.realpath(str(link)) == str(path)
    ]


def read_polygons(path: Path) -> Tuple[Dict[str, Any], np.ndarray, Dict[str, np.ndarray]]:
    """Return the facts of a map's polygons, the polygons, and their fields."""
    meta, _, geometry, fields = pyogrio.raw.read(str(path), layer='map')
    return meta, shapely.from_wkb(geometry), dict(zip(meta['fields'], fields))


def map_polygons(
    folder: Path, classes: np.ndarray, place: dict = UTM, nodata: Any = 255, **options: Any
) -> Tuple[Dict[str, Any], np.ndarray, Dict[str, np.ndarray]]:
    """Write a class map and its polygons into ``folder``; return them as ``read_polygons``."""
    path = write_raster(folder / 'map.tif', classes, place, nodata=nodata)
    names = options.pop('names', CLASSES)
    count = write_polygons(path, folder / 'map.gpkg', names, **options)
    meta, polygons, fields = read_polygons(folder / 'map.gpkg')
    assert count == len(polygons)
    assert sorted(p.name for p in folder.iterdir()) == ['map.gpkg', 'map.tif']
    return meta, polygons, fields


def write_areas(
    path: Path,
    shapes: Sequence[Any],
    crs: Any = 'EPSG:32650',
    layer: str = 'areas',
    kind: str = 'Unknown',
) -> Path:
    """Write shapes into a layer, which is added where the file is there."""
    pyogrio.raw.write(
        str(path),
        shapely.to_wkb(np.array(shapes, object)),
        [],
        [],
        layer=layer,
        geometry_type=kind,
        crs=crs,
        append=path.exists(),
        driver='GPKG' if path.suffix == '.gpkg' else 'GeoJSON',
    )
    return path
