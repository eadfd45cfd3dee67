"""Datasets, their transforms, and the generator of demo scenes."""
from .coco_polygons import CocoPolygonDataset, LoadPolygonAnnotations, NWPUPolygonDataset
from .demo_dataset import DemoParams, write_demo_data
from .demo_scenes import DemoScene, draw_scene
from .grouped_views import GroupedViewsSampler
from .label_score import LabelScore

__all__ = [
    'CocoPolygonDataset', 'DemoParams', 'DemoScene', 'GroupedViewsSampler', 'LabelScore',
    'LoadPolygonAnnotations', 'NWPUPolygonDataset', 'draw_scene', 'write_demo_data'
]
