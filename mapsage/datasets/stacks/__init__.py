"""Windows of places that several sensors show at several dates, read on one grid.

`dataset.py` decides which windows exist; `mapsage/geo/places/` finds the files and reads them.
`transforms.py` and `preprocessor.py` make the model's input, in the order of channels of
`mapsage/geo/stacks/`.
"""

from .dataset import SceneStackDataset
from .preprocessor import StackDataPreProcessor
from .transforms import DropDates, LoadSceneStack, PackStackInputs

__all__ = [
    'DropDates',
    'LoadSceneStack',
    'PackStackInputs',
    'SceneStackDataset',
    'StackDataPreProcessor',
]
