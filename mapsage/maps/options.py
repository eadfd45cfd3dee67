"""Options of a prediction that do not depend on the kind of model.

`commands/predict.py` fills them from the command line. Options of the model itself (precision,
batch size, windows) are not here: the model has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional, Sequence, Union

from .errors import PredictError


@dataclass(frozen=True)
class MapOptions:
    """Options of tools/predict.py about inputs and maps.

    Attributes:
        inputs: Files, folders and other names that GDAL opens.
        out: Folder of the maps.
        allow_remote: Whether a file of an input folder may make this process contact a server.
        mosaic: Name of the one map of all inputs; None for a map of each input.
        aoi: File with the polygons of an area of interest, or None.
        bands: Bands to read, counted from 1; None for the bands of the model.
        scale, gsd: Factor of the model's view of a scene, or size in meters of the pixels that the
            model was trained on, ``'auto'`` for the size in its passport; both None for the test
            pipeline's size.
        units: Unit in which scenes are read; None for the unit of the training.
        trust_scenes: Whether warnings about scenes are left out and other pixel sizes pass.
        tta: Whether windows are predicted with their mirror images.
        confidence, probabilities, polygons: Whether maps have these files.
        min_area, simplify: Least area and tolerance of polygons in pixels.
        skip_class: Names of classes without polygons.
        overwrite: Whether existing maps are made again.
        skip_broken: Whether inputs that cannot be read are left out.
        previews: Whether maps have a preview.
        shard, shards: This job begins at part ``shard`` (from 0) of so many.
    """

    inputs: Sequence[str]
    out: str
    allow_remote: bool = False
    mosaic: Optional[str] = None
    aoi: Optional[str] = None
    bands: Optional[Sequence[int]] = None
    scale: Optional[float] = None
    gsd: Union[None, float, str] = None
    units: Optional[str] = None
    trust_scenes: bool = False
    tta: bool = False
    confidence: bool = False
    probabilities: bool = False
    polygons: bool = False
    min_area: float = 0
    simplify: float = 1
    skip_class: Sequence[str] = ()
    overwrite: bool = False
    skip_broken: bool = False
    previews: bool = True
    shard: int = 0
    shards: int = 1


def class_indices(chosen: Sequence[str], names: Sequence[str]) -> List[int]:
    """Return the sorted indices of the chosen class names.

    Raises:
        PredictError: If a name is no class.
    """
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise PredictError(
            f'--skip-class {", ".join(unknown)}: the classes are {", ".join(names)}.'
        )
    return sorted({list(names).index(name) for name in chosen})
