"""Datasets, their transforms, and the generator of demo scenes."""
from .coco_polygons import CocoPolygonDataset, LoadPolygonAnnotations, NWPUPolygonDataset
from .demo_dataset import DemoParams, write_demo_data
from .demo_scenes import DemoScene, draw_scene

__all__ = [
    'CocoPolygonDataset', 'DemoParams', 'DemoScene', 'LoadPolygonAnnotations',
    'NWPUPolygonDataset', 'draw_scene', 'write_demo_data'
]
