"""Training windows read directly from raster scenes of any size and number of bands."""
from .dataset import GeoTiffDataset
from .transforms import LoadGeoTiffLabels, LoadGeoTiffWindow

__all__ = ['GeoTiffDataset', 'LoadGeoTiffLabels', 'LoadGeoTiffWindow']
