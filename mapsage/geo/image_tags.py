"""When an image was taken, and at which wavelengths, as the tags of its file say it."""

from __future__ import annotations

from typing import List, Optional, Sequence

from .gdal_files import open_file

# Tags with the time of an image, as (domain, name), in UTC: GDAL's standard name, and that of
# Harmonized Landsat Sentinel-2. TIFFTAG_DATETIME is not one of them, because programs write into it
# when they wrote the file.
_TIMES = (('IMAGERY', 'ACQUISITIONDATETIME'), (None, 'SENSING_TIME'))
# Micrometers of the units in ENVI's headers.
_MICROMETERS = {
    'micrometers': 1.0,
    'micrometer': 1.0,
    'um': 1.0,
    'nanometers': 1e-3,
    'nanometer': 1e-3,
    'nm': 1e-3,
}


def acquisition_time(path: str) -> Optional[str]:
    """Return the time at which an image was taken, such as ``2024-01-31T10:20:30Z``.

    The tags that count are ``ACQUISITIONDATETIME`` of GDAL's domain IMAGERY and ``SENSING_TIME`` of
    Harmonized Landsat Sentinel-2, which may list several times: the first one counts.

    Args:
        path: Path of the file, or a name that GDAL opens.

    Returns:
        The time in UTC; None if the file has none of these tags.
    """
    with open_file(path) as source:
        for domain, name in _TIMES:
            text = source.tags(ns=domain).get(name, '').split(';')[0].strip()
            if text:
                return f'{text[:10]}T{text[11:19]}Z' if len(text) >= 19 else text
    return None


def band_wavelengths(path: str, bands: Sequence[int]) -> Optional[List[float]]:
    """Return the central wavelengths of bands in micrometers.

    The tags of a band that count are ``CENTRAL_WAVELENGTH_UM`` of GDAL's domain IMAGERY, and
    ``wavelength`` with ``wavelength_units`` as GDAL copies them from ENVI's headers.

    Args:
        path: Path of the file, or a name that GDAL opens.
        bands: Band numbers, counted from 1.

    Returns:
        One number for each band; None if a band has no such tag, or no number in it.
    """
    wavelengths = []
    with open_file(path) as source:
        for band in bands:
            imagery, tags = source.tags(band, ns='IMAGERY'), source.tags(band)
            text = imagery.get('CENTRAL_WAVELENGTH_UM', tags.get('wavelength', ''))
            unit = 'um' if 'CENTRAL_WAVELENGTH_UM' in imagery else tags.get('wavelength_units', '')
            factor = _MICROMETERS.get(unit.lower())
            try:
                number = float(text)
            except ValueError:
                return None
            if factor is None or not 0 < number * factor < float('inf'):
                return None
            wavelengths.append(number * factor)
    return wavelengths
