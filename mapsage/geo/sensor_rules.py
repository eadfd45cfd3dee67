"""What only Sentinel-2, Landsat and PlanetScope need: names of products and bands, scales, offsets.

Sources: Sentinel-2 Products Specification 14.9 (``BOA_ADD_OFFSET`` of -1,000 from processing baseline
04.00 on), Landsat Collection 2 Level 2 Science Product Guide (0.0000275 and -0.2), Planet's imagery
product specification, and the common names of STAC's extension ``eo``.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Optional, Sequence, Tuple

from .stacks import canonical_band

SENTINEL2 = 'sentinel-2'
# Digital numbers that newer baselines of Sentinel-2 add to every value, and the scale of reflectance.
SHIFT, _SCALE = 1000, 1e-4

_PRODUCTS = (
    (
        SENTINEL2,
        r'S2[A-D]_MSI(?P<level>L1C|L2A)_(?P<day>\d{8})T\d{6}_N(?P<baseline>\d{4})_R\d{3}',
    ),
    (SENTINEL2, r'S2[A-D]_\d{1,2}[A-Z]{3}_(?P<day>\d{8})_\d+_(?P<level>L1C|L2A)'),
    (
        'landsat-oli',
        r'L[CETMO]0[89]_(?P<level>L[12])\w{2}_\d{6}_(?P<day>\d{8})_\d{8}_\d\d_\w\w',
    ),
    (
        'landsat-tm',
        r'L[CETMO]0[4-7]_(?P<level>L[12])\w{2}_\d{6}_(?P<day>\d{8})_\d{8}_\d\d_\w\w',
    ),
    (
        'planetscope',
        r'(?P<day>\d{8})_\d{6}(?:_[0-9a-f]{2})?_[0-9a-f]{4}_3B_AnalyticMS(?P<level>_SR)?(?![A-Za-z])',
    ),
)
# The first names files of Sentinel-2, the second files of Landsat.
_BANDS = (
    r'T\d{2}[A-Z]{3}_(?P<day>\d{8})T\d{6}_(?P<band>B\d[\dA])(?![\dA-Z])',
    r'_\w\w_(?:SR_|ST_)?(?P<band>B\d{1,2})\.',
)
_COMMON = {
    sensor: dict(pair.split('=') for pair in text.split())
    for sensor, text in (
        (
            SENTINEL2,
            'B1=coastal B2=blue B3=green B4=red B5=rededge071 B6=rededge075 B7=rededge078 B8=nir '
            'B8A=nir08 B9=nir09 B11=swir16 B12=swir22',
        ),
        (
            'landsat-oli',
            'B1=coastal B2=blue B3=green B4=red B5=nir08 B6=swir16 B7=swir22 B8=pan',
        ),
        ('landsat-tm', 'B1=blue B2=green B3=red B4=nir08 B5=swir16 B7=swir22 B8=pan'),
    )
}


class Product(NamedTuple):
    """What a name or a STAC item says of a file; None or empty for what it does not say.

    Attributes:
        sensor: ``'sentinel-2'``, ``'landsat-oli'``, ``'landsat-tm'`` or ``'planetscope'``.
        level: ``'L1'`` or ``'L2'``.
        baseline: Processing baseline of Sentinel-2, such as ``'05.09'``.
        day: Day as YYYYMMDD.
        names: Names of all bands of the file.
        units: Scale and offset of each of them, as they are stated.
        applied: Whether the pixels no longer have the offset that is stated elsewhere.
    """

    sensor: Optional[str] = None
    level: Optional[str] = None
    baseline: Optional[str] = None
    day: Optional[str] = None
    names: Tuple[str, ...] = ()
    units: Tuple[Tuple[Any, Any], ...] = ()
    applied: bool = False


def read_name(path: str) -> Product:
    """Return what the path of a product says; the folders of a product count, too."""
    product = Product()
    for sensor, pattern in _PRODUCTS:
        match = re.search(pattern, path)
        if match:
            baseline = match.groupdict().get('baseline')
            product = Product(
                sensor,
                'L2' if match['level'] in ('L2A', 'L2', '_SR') else 'L1',
                baseline and f'{baseline[:2]}.{baseline[2:]}',
                match['day'],
            )
            break
    for match in filter(None, (re.search(pattern, path) for pattern in _BANDS)):
        day = match.groupdict().get('day')
        # A file such as `LABELS_T1_B2.tif` is no product.
        if product.sensor or day:
            return product._replace(
                sensor=product.sensor or SENTINEL2, day=product.day or day, names=(match['band'],)
            )
    return product


def physical_units(
    sensor: Optional[str], level: Optional[str], baseline: Optional[str]
) -> Optional[Tuple[float, float]]:
    """Return scale and offset of a product's reflectance; None if its facts do not decide them."""
    if sensor == SENTINEL2 and baseline is not None:
        return _SCALE, -SHIFT * _SCALE if re.match('0?[4-9]|[1-9][0-9]', baseline) else 0.0
    if sensor is not None and sensor.startswith('landsat') and level is not None:
        return (2.75e-5, -0.2) if level == 'L2' else (2e-5, -0.1)
    return (_SCALE, 0.0) if sensor == 'planetscope' and level == 'L2' else None


def shift_of(scale: float, offset: float) -> int:
    """Return the digital numbers that an offset of Sentinel-2 adds: 1,000, or 0 for all others."""
    return SHIFT if abs(scale / _SCALE - 1) < 1e-6 and abs(offset / scale + SHIFT) < 1 else 0


def common_names(sensor: Optional[str], names: Sequence[str]) -> Tuple[str, ...]:
    """Return names as they can be compared: STAC's common names of a sensor's bands, small letters."""
    table = _COMMON.get(sensor or '', {})
    plain = (canonical_band(re.sub('^SR_', '', name.upper())) for name in names)
    return tuple(table.get(name, name.lower()) for name in plain)
