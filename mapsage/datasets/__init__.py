"""Datasets, their transforms, the generator of demo scenes, and the preparation of archives.

Importing this package registers the classes with MMEngine; configs refer to them by name. Scenes
with coordinates are read by `geotiff/`, unlabeled data by `semi_supervised/`. `demo/` draws the
demo's scenes, and `prepare/` converts the archives of data providers.
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
from .demo.change_pairs import ChangeParams, write_change_pairs
from .demo.crop_places import CROP_CLASSES, CROP_PALETTE, CropParams, write_crop_places
from .demo.demo_dataset import DemoParams, write_demo_data
from .demo.demo_scenes import DemoScene, draw_scene
from .demo.neighbor_scenes import NeighborParams, write_neighbor_scenes
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
    'BandDataPreProcessor', 'CROP_CLASSES', 'CROP_PALETTE', 'ChangeDataError', 'ChangeDataset',
    'ChangeParams', 'CocoPolygonDataset', 'CropParams', 'DemoParams', 'DemoScene', 'DropDates',
    'ExchangeDates', 'GeoTiffDataset', 'GroupedViewsSampler', 'HideLabels', 'JitterDates',
    'LabelScore', 'LabeledUnlabeledSampler', 'LoadBoxPseudoMasks', 'LoadChangeLabels',
    'LoadChangePair', 'LoadGeoTiffLabels', 'LoadGeoTiffWindow', 'LoadPolygonAnnotations',
    'LoadSceneStack', 'MMRS1MDataset', 'NWPUPolygonDataset', 'NeighborParams', 'PackSegInputs',
    'PackStackInputs', 'PackUnlabeledInputs', 'SceneStackDataset',
    'SegDataPreProcessor', 'SemiSupervisedDataset', 'ShiftDate', 'StackDataPreProcessor',
    'UnlabeledImages', 'draw_scene', 'write_change_pairs', 'write_crop_places', 'write_demo_data',
    'write_neighbor_scenes'
]
