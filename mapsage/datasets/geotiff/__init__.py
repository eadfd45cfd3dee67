"""Training windows read directly from raster scenes of any size and number of bands.

`dataset.py` decides which windows exist, `transforms.py` reads them in the loader's workers.
`split.py` and `area.py` restrict the pixels that count, `windows.py` draws random windows,
`shared_scan.py` caches what is known about a scene, and `summary.py` writes the log at the start.
"""

from .dataset import GeoTiffDataset
from .transforms import LoadGeoTiffLabels, LoadGeoTiffWindow

__all__ = ['GeoTiffDataset', 'LoadGeoTiffLabels', 'LoadGeoTiffWindow']
