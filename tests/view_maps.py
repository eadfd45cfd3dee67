"""Maps for the tests of the viewer, as tools/predict.py writes them, with scene and labels."""

from __future__ import annotations

import http.client
import json
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, Iterator, Mapping, NamedTuple, Optional, Tuple, TypeVar
from urllib.parse import urlsplit

import numpy as np
import rasterio
from affine import Affine
from rasterio.transform import from_origin

from mapsage.extras.viewer import ViewServer
from mapsage.geo import ClassMapWriter, MapInfo, confidence_path, write_cog, write_polygons
from mapsage.geo.gdal_files import open_file

Server = TypeVar('Server', bound=ViewServer)

UTM = dict(crs='EPSG:32631', transform=from_origin(300000, 3400000, 0.5, 0.5))
TURNED = dict(
    crs='EPSG:32632',
    transform=Affine.translation(400000, 5000000) * Affine.rotation(30) * Affine.scale(0.5, -0.5),
)
DEGREES = dict(crs='EPSG:4326', transform=from_origin(10, 50, 1e-5, 1e-5))
NOWHERE = dict(crs=None, transform=None)
WRONG = slice(100, 150), slice(200, 300)  # rows and columns of 5,000 pixels that the map has wrong


class Folders(NamedTuple):
    """Folders of maps, scenes and labels."""

    maps: Path
    scenes: Path
    truth: Path


def folders(root: Path) -> Folders:
    """Return three new folders."""
    made = Folders(root / 'maps', root / 'scenes', root / 'labels')
    for each in made:
        each.mkdir(parents=True)
    return made


def add_map(
    where: Folders,
    name: str,
    size: Tuple[int, int] = (600, 400),
    classes: int = 6,
    confidence: bool = True,
    polygons: bool = True,
    crs: Any = UTM['crs'],
    transform: Optional[Affine] = UTM['transform'],
) -> np.ndarray:
    """Write a map of tiles of 50 pixels, its scene and its labels; return the classes.

    The first 20 x 40 pixels have no data. Confidence is 40 % left of the middle and 90 % right.
    """
    width, height = size
    rows, columns = np.mgrid[:height, :width] // 50
    labels = ((rows * 7 + columns) % classes).astype(np.uint8)
    labels[:20, :40] = 255
    sure = np.where(labels == 255, 255, np.where(np.arange(width) < width // 2, 40, 90))
    info = MapInfo(
        [f'class {value}' for value in range(classes)],
        [(40 * value % 256, 255 - value, value) for value in range(classes)],
        crs,
        transform,
    )
    working = where.maps / '.working.tif'
    with ClassMapWriter(working, width, height, info, confidence) as writer:
        writer.write(0, labels, sure.astype(np.uint8) if confidence else None)
    write_cog(working, where.maps / f'{name}.tif')
    if confidence:
        write_cog(confidence_path(working), confidence_path(where.maps / f'{name}.tif'))
        Path(confidence_path(working)).unlink()
    working.unlink()
    if polygons:
        write_polygons(
            where.maps / f'{name}.tif',
            where.maps / f'{name}.gpkg',
            info.class_names,
            palette=info.palette,
        )
    truth = labels.copy()
    truth[WRONG] = (truth[WRONG] + 1) % classes
    write_raster(where.truth / f'{name}.tif', truth[None], crs, transform)
    write_raster(
        where.scenes / f'{name}.tif', np.stack([labels * 40, labels, 255 - labels]), crs, transform
    )
    return labels


def add_large_map(where: Folders, name: str, side: int) -> np.ndarray:
    """Write a square map of tiles of 50 pixels with confidence; return the classes of the tiles."""
    rows, columns = np.mgrid[: side // 50, : side // 50]
    tiles = ((rows * 7 + columns) % 6).astype(np.uint8)
    info = MapInfo(
        [f'class {value}' for value in range(6)],
        [(40 * value % 256, 255 - value, value) for value in range(6)],
        UTM['crs'],
        UTM['transform'],
    )
    working = where.maps / '.working.tif'
    with ClassMapWriter(working, side, side, info, True) as writer:
        for row, values in enumerate(tiles):
            strip = np.repeat(np.repeat(values[None], 50, 0), 50, 1)
            writer.write(50 * row, strip, 50 + strip)
    write_cog(confidence_path(working), confidence_path(where.maps / f'{name}.tif'))
    write_cog(working, where.maps / f'{name}.tif')
    Path(confidence_path(working)).unlink()
    working.unlink()
    counts = np.bincount(tiles.ravel()) * 2500
    name_scene(
        where,
        name,
        where.scenes / 'none.tif',
        (side, side),
        {f'class {value}': int(count) for value, count in enumerate(counts)},
    )
    return tiles


def write_raster(
    path: Path, bands: np.ndarray, crs: Any, transform: Optional[Affine], **profile: Any
) -> None:
    """Write a striped GeoTIFF, as scenes are that nobody has prepared for a browser."""
    with open_file(
        path,
        'w',
        driver='GTiff',
        width=bands.shape[2],
        height=bands.shape[1],
        count=len(bands),
        dtype=bands.dtype,
        crs=crs,
        transform=transform,
        **profile,
    ) as out:
        out.write(bands)


def name_scene(where: Folders, name: str, scene: Path, size: Tuple[int, int], pixels: Any) -> None:
    """Write the report of a map, which names its scene and counts its pixels."""
    (where.maps / f'{name}.json').write_text(
        json.dumps(
            dict(
                settings=dict(input=[[str(scene), 1, 1]]),
                width=size[0],
                height=size[1],
                pixels=pixels,
            )
        )
    )


def values_of(path: Path) -> np.ndarray:
    """Return all bands of a raster, (bands, H, W)."""
    with rasterio.open(path) as source:
        return source.read()


def open_link(link: str) -> str:
    """Open the link of a viewer as a browser does; return the value of the ``Cookie`` header."""
    url = urlsplit(link)
    assert url.port is not None
    connection = http.client.HTTPConnection('127.0.0.1', url.port)
    connection.request('GET', f'{url.path}?{url.query}')
    answer = connection.getresponse()
    assert answer.status == 303, answer.read()
    connection.close()
    return answer.headers['Set-Cookie'].partition(';')[0]


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Let a viewer answer in a thread, and close it at the end."""
    with server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def request(
    server: ViewServer, method: str, path: str, headers: Mapping[str, str], body: str = ''
) -> Tuple[http.client.HTTPResponse, bytes]:
    """Return the answer of a viewer to a request with exactly these headers, and its body."""
    connection = http.client.HTTPConnection('127.0.0.1', server.server_port)
    connection.request(method, path, body or None, dict(headers))
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content
