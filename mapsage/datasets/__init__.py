"""Datasets and their transforms.

Importing this package registers the classes with MMEngine; configs refer to them by name. Scenes
with coordinates are read by `geotiff/`, unlabeled data by `semi_supervised/`.
"""
from .band_preprocessor import BandDataPreProcessor
from .batch_preprocessor import SegDataPreProcessor
from .change import (
    ChangeDataError,
    ChangeDataset,
    ExchangeDates,
    JitterDates,
    LoadChangeLabels,
    LoadChangePair,
    ShiftDate,
)
from .coco_polygons import CocoPolygonDataset, LoadPolygonAnnotations, NWPUPolygonDataset
from .geotiff import GeoTiffDataset, LoadGeoTiffLabels, LoadGeoTiffWindow
from .grouped_views import GroupedViewsSampler
from .label_score import LabelScore
from .mmrs1m import LoadBoxPseudoMasks, MMRS1MDataset
from .packing import PackSegInputs
from .semi_supervised import (
    HideLabels,
    LabeledUnlabeledSampler,
    PackUnlabeledInputs,
    SemiSupervisedDataset,
    UnlabeledImages,
)
from .stacks import (
    DropDates,
    LoadSceneStack,
    PackStackInputs,
    SceneStackDataset,
    StackDataPreProcessor,
)

__all__ = [
    'BandDataPreProcessor', 'ChangeDataError', 'ChangeDataset', 'CocoPolygonDataset', 'DropDates',
    'ExchangeDates', 'GeoTiffDataset', 'GroupedViewsSampler', 'HideLabels', 'JitterDates',
    'LabelScore', 'LabeledUnlabeledSampler', 'LoadBoxPseudoMasks', 'LoadChangeLabels',
    'LoadChangePair', 'LoadGeoTiffLabels', 'LoadGeoTiffWindow', 'LoadPolygonAnnotations',
    'LoadSceneStack', 'MMRS1MDataset', 'NWPUPolygonDataset', 'PackSegInputs', 'PackStackInputs',
    'PackUnlabeledInputs', 'SceneStackDataset', 'SegDataPreProcessor', 'SemiSupervisedDataset',
    'ShiftDate', 'StackDataPreProcessor', 'UnlabeledImages'
]
