"""Rasters and vectors with coordinates: everything that uses GDAL, PROJ and GEOS.

`raster.py` reads scenes and `mosaic.py` joins several into one; `gdal_names.py` has the names that
GDAL opens apart from paths, and `gdal_files.py` opens them. Labels are in `labels.py` (rasters) and
`vector_labels.py` (polygons). Maps are written by `cog.py`, `probabilities.py` and `polygons.py`,
copies of scenes that are read faster by `fast_copy.py`.

Pixel coordinates are (column, row), and an integer is the upper left corner of a pixel, whose
center lies at + 0.5.
"""

from .aoi import AreaOfInterest, SceneArea
from .blocks import PARTS, BlockSplit, ScenePart
from .cog import (
    CONFIDENCE_NODATA,
    ClassMapWriter,
    MapInfo,
    confidence_path,
    read_classes,
    write_cog,
)
from .coordinates import reprojected, to_map, window_outline
from .ellipsoid import pixel_side, pixel_sides
from .errors import GeoError, RasterBlockError
from .fast_copy import (
    NotCopiedError,
    decoded_bytes,
    estimate_copy_bytes,
    measure_read_times,
    write_fast_copy,
)
from .gdal_files import gdal_environment, stamp
from .gdal_names import (
    PICTURE_SUFFIXES,
    SCENE_SUFFIXES,
    as_vsi,
    content_of,
    files_of,
    is_gdal_name,
    is_remote,
    locate,
    match,
    output_name,
    remote_file,
    server_in,
    suffix_of,
    without_secrets,
)
from .globe import EARTH_RADIUS, Globe
from .grid_position import BLOCK, RasterOnGrid, box_on_grid, read_on_grid
from .image_tags import acquisition_time, band_wavelengths
from .labels import VECTOR_SUFFIXES, LabelFiles, RasterLabels
from .mosaic import Mosaic
from .polygons import write_polygons
from .pool import open_raster
from .probabilities import ProbabilityWriter, probabilities_path
from .raster import Raster
from .reference_systems import crs_of_code, full_turn, same_crs
from .scene_facts import HARMONIZED, SceneFacts, facts_of, open_scene
from .statistics import BandStatistics, band_statistics, hidden_data_band, tally_bands
from .vector_labels import BurntLabels, VectorLabels
from .vsi import forbid_servers, list_folder, remove_file, write_file

__all__ = [
    'AreaOfInterest',
    'BLOCK',
    'BandStatistics',
    'BlockSplit',
    'BurntLabels',
    'CONFIDENCE_NODATA',
    'ClassMapWriter',
    'EARTH_RADIUS',
    'GeoError',
    'Globe',
    'HARMONIZED',
    'LabelFiles',
    'MapInfo',
    'Mosaic',
    'NotCopiedError',
    'PARTS',
    'PICTURE_SUFFIXES',
    'ProbabilityWriter',
    'Raster',
    'RasterBlockError',
    'RasterLabels',
    'RasterOnGrid',
    'SCENE_SUFFIXES',
    'SceneArea',
    'SceneFacts',
    'ScenePart',
    'VECTOR_SUFFIXES',
    'VectorLabels',
    'acquisition_time',
    'as_vsi',
    'band_statistics',
    'band_wavelengths',
    'box_on_grid',
    'confidence_path',
    'content_of',
    'crs_of_code',
    'decoded_bytes',
    'estimate_copy_bytes',
    'facts_of',
    'files_of',
    'forbid_servers',
    'full_turn',
    'gdal_environment',
    'hidden_data_band',
    'is_gdal_name',
    'is_remote',
    'list_folder',
    'locate',
    'match',
    'measure_read_times',
    'open_raster',
    'open_scene',
    'output_name',
    'pixel_side',
    'pixel_sides',
    'probabilities_path',
    'read_classes',
    'read_on_grid',
    'remote_file',
    'remove_file',
    'reprojected',
    'same_crs',
    'server_in',
    'stamp',
    'suffix_of',
    'tally_bands',
    'to_map',
    'window_outline',
    'without_secrets',
    'write_cog',
    'write_fast_copy',
    'write_file',
    'write_polygons',
]
