"""Places that several sensors show at several dates: which files show them, read on one grid.

`places.py` and `file_lists.py` say which files show a place, `place_raster.py` reads them.
`place_inputs.py` and `pair_inputs.py` find what a prediction maps. Nothing here needs PyTorch or
the MM packages, so that an exported model maps places without them.
"""

from .pair_inputs import PairInputs, shift_note
from .place_inputs import PlaceInputs
from .place_raster import PlaceRaster

__all__ = ['PairInputs', 'PlaceInputs', 'PlaceRaster', 'shift_note']
