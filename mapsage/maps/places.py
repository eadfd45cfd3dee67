"""Where a model of several dates or sensors finds its places: folders and lists, or two scenes.

The settings come from the config (`model.place_settings`) or from the description of an exported
file. Single scenes have none, and are found by `inputs.find_inputs`.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Sequence

from mapsage.geo import GeoError
from mapsage.geo.places import PairInputs, PlaceInputs

from .errors import PredictError
from .map_model import PlaceSource


def open_places(settings: Mapping[str, Any]) -> PlaceSource:
    """Return the source of the places that a model takes.

    Args:
        settings: ``type``, the name of the dataset's class, its ``sensors``, and others of its
            settings.

    Raises:
        GeoError, StackLayoutError: If a setting cannot be read.
    """
    return PairInputs(settings) if settings['type'] == 'ChangeDataset' else PlaceInputs(settings)


def find_places(
    places: PlaceSource, paths: Sequence[str], options: Mapping[str, Optional[object]]
) -> Dict[str, str]:
    """Return the places of a command line: name of a map -> path of the file with the grid.

    Args:
        places: Places of the model.
        paths: Inputs of the command line.
        options: Options for single scenes, by name; None if not given.

    Raises:
        PredictError: If an option is for single scenes, or an input has no place.
    """
    unused = [name for name, value in options.items() if value is not None]
    if unused:
        raise PredictError(
            f'{", ".join(unused)}: the model takes scene stacks, whose bands and '
            f'grid the config decides (sensors, grid); leave the option out.'
        )
    try:
        return places.find(paths)
    except GeoError as error:
        raise PredictError(str(error)) from error
