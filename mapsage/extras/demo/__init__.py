"""Data to start with: made aerial scenes for the demo, and archives of data providers.

`demo_dataset.py`, `neighbor_scenes.py`, `change_pairs.py` and `crop_places.py` write the files.
Scenes are drawn by `demo_scenes.py`, which calls `landscape.py` and `settlement.py` to paint on a
canvas of `ground_canvas.py`. Every byte follows from a seed: a change in the order of random draws
is a new format of the data. `prepare/` converts archives to the folders that datasets read.
"""

from mapsage_launcher.only_help import is_only_help

# The help of a program needs none of these.
if not is_only_help():
    from .change_pairs import ChangeParams, write_change_pairs
    from .crop_places import CROP_CLASSES, CROP_PALETTE, CropParams, write_crop_places
    from .demo_dataset import DemoParams, write_demo_data
    from .demo_scenes import DemoScene, draw_scene
    from .neighbor_scenes import NeighborParams, write_neighbor_scenes

__all__ = [
    'CROP_CLASSES',
    'CROP_PALETTE',
    'ChangeParams',
    'CropParams',
    'DemoParams',
    'DemoScene',
    'NeighborParams',
    'draw_scene',
    'write_change_pairs',
    'write_crop_places',
    'write_demo_data',
    'write_neighbor_scenes',
]
