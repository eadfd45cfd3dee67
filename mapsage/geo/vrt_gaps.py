"""Ground that no source of a virtual raster (VRT) shows.

GDAL fills such gaps with no-data, or with 0 where a VRT has none, and calls them valid. Here the
description of a VRT, its XML, says where its sources lie; `Raster` takes the rest
as invalid. What the sources hide themselves, by no-data or a warp, is computed by GDAL in a second
VRT that shows 255 where the first one shows a source. A VRT that hides pixels by a mask, an alpha
band or no-data needs no second one.

Shapes:
    xs, ys     (columns,), (rows,) positions in pixels of a raster, increasing
    covered    (rows, columns) bool
"""

from __future__ import annotations

import copy
import os
from typing import Any, Dict, List, Optional, Sequence, Tuple
from xml.etree import ElementTree

import numpy as np
import rasterio
from rasterio.windows import Window

from . import gdal_names
from .file_handles import FileHandles

# Share of a pixel by which GDAL lets the edge of a source lie off the pixels' edges
# (VRTSimpleSource::GetSrcDstWindow).
_ON_EDGE = 0.001
# Cells of the grid between the edges of all sources; with more of them the whole is not examined.
_MOST_CELLS = 4_000_000
_SOURCES = (
    'SimpleSource',
    'ComplexSource',
    'AveragedSource',
    'KernelFilteredSource',
    'NoDataFromMaskSource',
)
# Parts of a source that change its values.
_VALUES = (
    'ScaleOffset',
    'ScaleRatio',
    'LUT',
    'ColorTableComponent',
    'Exponent',
    'SrcMin',
    'SrcMax',
    'DstMin',
    'DstMax',
    'Clamp',
)


class SourceCover:
    """Where the sources of some bands of a VRT show something.

    Args:
        boxes: Left, top, right and bottom of the sources in pixels of the VRT, float64 (N, 4).
        origins: Position in a source, and its pixels for one of the VRT: x, y, in x, in y;
            float64 (N, 4).
        inner: Covers of the sources that are VRTs with gaps, by number.
        computed: Further sources, as XML of a VRT whose last band is 0 where they show nothing.
    """

    def __init__(
        self,
        boxes: np.ndarray,
        origins: np.ndarray,
        inner: Dict[int, List[SourceCover]],
        computed: str = '',
    ) -> None:
        self._boxes, self._origins, self._inner = boxes, origins, inner
        self._computed = FileHandles(computed) if computed else None
        # The first and the last pixel of a source, as GDAL rounds them.
        self._first = np.floor(boxes[:, :2] + _ON_EDGE)
        self._end = np.ceil(boxes[:, 2:] - _ON_EDGE)

    def covered(self, xs: np.ndarray, ys: np.ndarray) -> np.ndarray:
        """Return which positions a source shows."""
        covered = np.zeros((len(ys), len(xs)), bool)
        if not covered.size:
            return covered
        low, high = np.array([xs[0], ys[0]]), np.array([xs[-1], ys[-1]])
        meeting = (self._first <= high).all(1) & (self._end > low).all(1)
        for number in np.flatnonzero(meeting).tolist():
            columns, rows = (
                slice(*np.searchsorted(axis, (self._first[number, side], self._end[number, side])))
                for side, axis in enumerate((xs, ys))
            )
            block = covered[rows, columns]
            if number not in self._inner:
                block[:] = True
                continue
            x, y, per_x, per_y = self._origins[number]
            left, top = self._boxes[number, :2]
            inside = np.ones(block.shape, bool)
            for cover in self._inner[number]:
                inside &= cover.covered(
                    (xs[columns] - left) * per_x + x, (ys[rows] - top) * per_y + y
                )
            block |= inside
        if self._computed is not None and not covered.all():
            covered |= self._read_computed(self._computed.get(), xs, ys)
        return covered

    def close(self) -> None:
        """Close the files of this process."""
        if self._computed is not None:
            self._computed.close()
        for covers in self._inner.values():
            for cover in covers:
                cover.close()

    def is_whole(self, width: int, height: int) -> bool:
        """Return whether the sources are known to cover a VRT of this size."""
        if self._inner or self._computed is not None:
            return False
        edges = [
            np.unique(np.clip([*self._first[:, side], *self._end[:, side], 0, size], 0, size))
            for side, size in enumerate((width, height))
        ]
        if len(edges[0]) * len(edges[1]) > _MOST_CELLS:
            return False
        return bool(self.covered(*(axis[:-1] + 0.5 for axis in edges)).all())

    @staticmethod
    def _read_computed(
        source: rasterio.DatasetReader, xs: np.ndarray, ys: np.ndarray
    ) -> np.ndarray:
        covered = np.zeros((len(ys), len(xs)), bool)
        columns, rows = (np.floor(axis).astype(np.int64) for axis in (xs, ys))
        inside = np.ix_(
            (rows >= 0) & (rows < source.height), (columns >= 0) & (columns < source.width)
        )
        columns, rows = columns[inside[1][0]], rows[inside[0][:, 0]]
        if len(columns) and len(rows):
            window = Window(
                columns[0], rows[0], columns[-1] - columns[0] + 1, rows[-1] - rows[0] + 1
            )
            values = source.read(source.count, window=window)
            covered[inside] = values[np.ix_(rows - rows[0], columns - columns[0])] != 0
        return covered


def find_cover(
    source: rasterio.DatasetReader,
    path: str,
    bands: Sequence[int],
    hides: bool,
    outer: Tuple[str, ...] = (),
) -> Optional[List[SourceCover]]:
    """Return where the sources of a VRT show something, for each of some bands.

    A pixel is in a gap if no band shows it.

    Args:
        source: Open VRT.
        path: Its name.
        bands: Band numbers, counted from 1.
        hides: Whether a mask, an alpha band or no-data hides pixels of the VRT.
        outer: Names of the VRTs whose source this one is, from the outermost on.

    Returns:
        The covers; None if there are no gaps.

    Raises:
        GeoError: If a VRT among the sources cannot be opened.
    """
    root = _description(source, path) if source.driver == 'VRT' and path not in outer else None
    if root is None:
        return None
    folder, outer = os.path.dirname(gdal_names.as_vsi(path)), (*outer, path)
    for name in root.iter():
        if name.tag in ('SourceFilename', 'SourceDataset') and name.get('relativeToVRT') == '1':
            name.text = os.path.join(folder, (name.text or '').strip())
            name.set('relativeToVRT', '0')
    kind = root.get('subClass')
    if kind == 'VRTWarpedDataset':
        return (
            None
            if hides
            else [
                SourceCover(
                    np.zeros((0, 4)), np.zeros((0, 4)), {}, _warp_with_alpha(root, source.count)
                )
            ]
        )
    if kind in ('VRTPansharpenedDataset', 'VRTProcessedDataset'):
        return _find_shared(source, root, outer)
    covers: Dict[str, SourceCover] = {}
    for element in root.findall('VRTRasterBand'):
        if int(element.get('band', 0)) not in bands:
            continue
        if element.get('subClass') not in (None, 'VRTSourcedRasterBand', 'VRTDerivedRasterBand'):
            return None
        sources = [child for child in element if child.tag in _SOURCES]
        if not sources and element.get('subClass') == 'VRTDerivedRasterBand':
            return None
        # Most bands have the same files; which band is read matters in another VRT only.
        key = repr(
            [
                [
                    (part.tag, part.text, part.attrib)
                    for part in child
                    if part.tag != 'SourceBand' or _is_vrt(child.findtext('SourceFilename') or '')
                ]
                for child in sources
            ]
        )
        if key not in covers:
            covers[key] = _cover_of_sources(sources, source, hides, outer)
        if covers[key].is_whole(source.width, source.height):
            return None
    return list(covers.values())


def _description(source: rasterio.DatasetReader, path: str) -> Optional[ElementTree.Element]:
    """Return the XML of a VRT; None if there is none."""
    # The file has the sizes of the sources, which GDAL leaves out of what it gives.
    try:
        content = gdal_names.content_of(path)
        if content.lstrip().startswith(b'<VRTDataset') and b'<!' not in content.replace(
            b'<!--', b''
        ).replace(b'<![CDATA[', b''):
            return ElementTree.fromstring(content)
    except (OSError, ValueError, ElementTree.ParseError):
        # A name that is no file, such as vrt://, or text that GDAL only understands.
        pass
    text = source.tags(ns='xml:VRT').get('xml:VRT')
    return None if text is None else ElementTree.fromstring(text)


def _cover_of_sources(
    elements: Sequence[ElementTree.Element],
    source: rasterio.DatasetReader,
    hides: bool,
    outer: Tuple[str, ...],
) -> SourceCover:
    """Return where the sources of a band show something."""
    boxes: List[Tuple[float, ...]] = []
    origins: List[Tuple[float, ...]] = []
    see_through: List[ElementTree.Element] = []
    inner: Dict[int, List[SourceCover]] = {}
    sizes: Dict[str, Tuple[float, float]] = {}
    for element in elements:
        transparent = element.findtext('NODATA') is not None or (
            element.findtext('UseMaskBand') or ''
        ).lower() in ('true', '1')
        place = _place(element, sizes)
        if place is None:
            continue
        covers = _inner_covers(element, outer)
        if transparent and not hides and not covers:
            see_through.append(element)
            continue
        if covers:
            inner[len(boxes)] = covers
        boxes.append(place[:4])
        origins.append(place[4:])
    return SourceCover(
        np.array(boxes, float).reshape(-1, 4),
        np.array(origins, float).reshape(-1, 4),
        inner,
        _mosaic_of(see_through, source) if see_through else '',
    )


def _place(
    element: ElementTree.Element, sizes: Dict[str, Tuple[float, float]]
) -> Optional[Tuple[float, ...]]:
    """Return where a source lies in the VRT, cut to what the source has, and which part it shows.

    Args:
        element: The source.
        sizes: Widths and heights of files that were opened, by path; further ones are added.

    Returns:
        Left, top, right and bottom in the VRT, the first position in the source, and pixels of the
        source for one of the VRT; None if the source shows nothing.
    """
    limits = _source_size(element, sizes)
    shown, target = (_rectangle(element.find(name)) for name in ('SrcRect', 'DstRect'))
    if shown is None and target is None:
        shown = target = (0.0, 0.0, *limits)
    if shown is None or target is None:
        # GDAL shows nothing of such a source.
        return None
    low, high, first, scales = [], [], [], []
    for axis in (0, 1):
        scale = shown[axis + 2] / target[axis + 2]
        begin = max(shown[axis], 0.0)
        end = min(shown[axis] + shown[axis + 2], limits[axis])
        if not end > begin:
            return None
        low.append(target[axis] + (begin - shown[axis]) / scale)
        high.append(target[axis] + (end - shown[axis]) / scale)
        first.append(begin)
        scales.append(scale)
    return (*low, *high, *first, *scales)


def _source_size(
    element: ElementTree.Element, sizes: Dict[str, Tuple[float, float]]
) -> Tuple[float, float]:
    properties = element.find('SourceProperties')
    if properties is not None:
        return float(properties.get('RasterXSize', 0)), float(properties.get('RasterYSize', 0))
    path = (element.findtext('SourceFilename') or '').strip()
    if path not in sizes:
        with FileHandles(path).open() as source:
            sizes[path] = source.width, source.height
    return sizes[path]


def _rectangle(element: Optional[ElementTree.Element]) -> Optional[Tuple[float, ...]]:
    if element is None:
        return None
    rectangle = tuple(float(element.get(name, -1)) for name in ('xOff', 'yOff', 'xSize', 'ySize'))
    return rectangle if rectangle[2] > 0 and rectangle[3] > 0 else None


def _inner_covers(element: ElementTree.Element, outer: Tuple[str, ...]) -> List[SourceCover]:
    """Return the covers of a source that is a VRT with gaps; else none."""
    path = (element.findtext('SourceFilename') or '').strip()
    band = element.findtext('SourceBand') or '1'
    if not _is_vrt(path) or not band.strip().isdigit():
        return []
    handles = FileHandles(path)
    try:
        source = handles.open()
        with source:
            # No-data of a source is a value like any other, unless the VRT says otherwise.
            covers = find_cover(source, path, (int(band),), False, outer)
    finally:
        handles.close()
    return covers or []


def _is_vrt(path: str) -> bool:
    path = path.strip()
    return path.lower().endswith('.vrt') or path.startswith(('vrt://', '<VRTDataset'))


def _find_shared(
    source: rasterio.DatasetReader, root: ElementTree.Element, outer: Tuple[str, ...]
) -> Optional[List[SourceCover]]:
    """Return the cover of a VRT whose pixels are computed from several files on one ground.

    A pixel is covered where all of them show something.
    """
    placed = []
    for element in root.iter():
        covers = [] if element.find('SourceFilename') is None else _inner_covers(element, outer)
        if covers:
            with FileHandles((element.findtext('SourceFilename') or '').strip()).open() as inner:
                to_source = ~inner.transform * source.transform
            placed.append(_whole(source, (*(to_source * (0, 0)), to_source.a, to_source.e), covers))
    return [_whole(source, (0, 0, 1, 1), placed)] if placed else None


def _whole(
    source: rasterio.DatasetReader, origin: Tuple[float, ...], inner: List[SourceCover]
) -> SourceCover:
    return SourceCover(
        np.array([[0.0, 0.0, source.width, source.height]]), np.array([origin], float), {0: inner}
    )


def _mosaic_of(elements: Sequence[ElementTree.Element], source: rasterio.DatasetReader) -> str:
    """Return a VRT of one band with 255 where sources show something."""
    root = ElementTree.Element(
        'VRTDataset', rasterXSize=str(source.width), rasterYSize=str(source.height)
    )
    band = ElementTree.SubElement(root, 'VRTRasterBand', dataType='Byte', band='1')
    for element in elements:
        shown = copy.deepcopy(element)
        shown.tag = 'ComplexSource'
        for part in [part for part in shown if part.tag in _VALUES]:
            shown.remove(part)
        for name, value in (('ScaleOffset', '255'), ('ScaleRatio', '0')):
            ElementTree.SubElement(shown, name).text = value
        band.append(shown)
    return ElementTree.tostring(root, 'unicode')


def _warp_with_alpha(root: ElementTree.Element, bands: int) -> str:
    """Return a warped VRT with a further band that is 0 where the warp shows nothing."""
    root = copy.deepcopy(root)
    options: Any = root.find('GDALWarpOptions')
    number = str(bands + 1)
    last = max(
        (index for index, child in enumerate(root) if child.tag == 'VRTRasterBand'), default=0
    )
    band = ElementTree.Element(
        'VRTRasterBand', dataType='Byte', band=number, subClass='VRTWarpedRasterBand'
    )
    ElementTree.SubElement(band, 'ColorInterp').text = 'Alpha'
    root.insert(last + 1, band)
    for old in options.findall('DstAlphaBand'):
        options.remove(old)
    ElementTree.SubElement(options, 'DstAlphaBand').text = number
    return ElementTree.tostring(root, 'unicode')
