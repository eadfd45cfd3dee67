"""Datasets and their transforms.

Importing this package registers the classes with MMEngine; configs refer to them by name. Scenes
with coordinates are read by `geotiff/`, stacks of dates and sensors by `stacks/`.
"""

from .band_preprocessor import BandDataPreProcessor
from .batch_preprocessor import SegDataPreProcessor
from .coco_polygons import CocoPolygonDataset, LoadPolygonAnnotations, NWPUPolygonDataset
from .geotiff import GeoTiffDataset, LoadGeoTiffLabels, LoadGeoTiffWindow
from .grouped_views import GroupedViewsSampler
from .label_score import LabelScore
from .packing import PackSegInputs
from .stacks import (
    DropDates,
    LoadSceneStack,
    PackStackInputs,
    SceneStackDataset,
    StackDataPreProcessor,
)

__all__ = [
    'BandDataPreProcessor',
    'CocoPolygonDataset',
    'DropDates',
    'GeoTiffDataset',
    'GroupedViewsSampler',
    'LabelScore',
    'LoadGeoTiffLabels',
    'LoadGeoTiffWindow',
    'LoadPolygonAnnotations',
    'LoadSceneStack',
    'NWPUPolygonDataset',
    'PackSegInputs',
    'PackStackInputs',
    'SceneStackDataset',
    'SegDataPreProcessor',
    'StackDataPreProcessor',
]
