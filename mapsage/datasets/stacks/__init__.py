"""Windows of places that several sensors show at several dates, read on one grid.

`dataset.py` decides which windows exist, `places.py` and `file_lists.py` which files show a place,
and `place_raster.py` reads them; `place_inputs.py` finds the places of a prediction.
`transforms.py` and `preprocessor.py` make the model's input, in the order of channels of
`mapsage/stacks/`.
"""
from .dataset import SceneStackDataset
from .place_inputs import PlaceInputs
from .preprocessor import StackDataPreProcessor
from .transforms import DropDates, LoadSceneStack, PackStackInputs

__all__ = [
    'DropDates', 'LoadSceneStack', 'PackStackInputs', 'PlaceInputs', 'SceneStackDataset',
    'StackDataPreProcessor']
