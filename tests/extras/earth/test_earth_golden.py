"""Features of the encoders on every machine and version, against figures of the published code.

``tests/compare_earth.py`` printed the figures; it compares whole maps where the published code can
be downloaded.
"""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import pytest
import torch
from earth_states import OLMOEARTH, TERRAMIND, fill, images, rename, stack, summarize

from mapsage.extras.earth import DOFA, OlmoEarth, PrithviEO, TerraMind

DATES = ((2023, 3, 15), (2023, 6, 1), (2024, 12, 31))
CENTER = dict(s2=2000.0, s1=-14.0, drone=120.0)
SPREAD = dict(s2=1900.0, s1=9.0, drone=110.0)
ARCH = dict(embed_dims=192, num_layers=4, num_heads=3)
S2 = ('B01', 'B02', 'B03', 'B04', 'B05', 'B06', 'B07', 'B08', 'B8A', 'B09', 'B11', 'B12')

CASES: Dict[str, Tuple[Any, Dict[str, Any], Any, Any, int, List[float]]] = {
    'olmoearth': (
        OlmoEarth,
        dict(
            sensors=dict(s2=dict(bands=('B12', 'B8', 'B04', 'B3', 'B02'), max_dates=3)),
            arch='nano',
            out_indices=(3,),
        ),
        OLMOEARTH,
        (16, 24),
        3,
        [-0.0207, 0.81946, -0.67604, -0.30601, 0.2151, 0.56308],
    ),
    'terramind': (
        TerraMind,
        dict(
            sensors=dict(s2=dict(bands=S2, max_dates=3), s1=dict(bands=('VV', 'VH'), max_dates=3)),
            arch=ARCH,
            out_indices=(1, 3),
        ),
        TERRAMIND,
        (96, 96),
        3,
        [
            0.56927,
            1.13528,
            -0.17199,
            -0.01591,
            -0.35828,
            0.46555,
            1.15732,
            -0.04949,
            0.0064,
            0.6416,
            -0.57767,
            -0.35963,
            -1.32526,
            -0.3643,
            -0.20673,
            0.55499,
        ],
    ),
    'prithvi': (
        PrithviEO,
        dict(
            sensors=dict(s2=dict(bands=('B04', 'BLUE', 'B11'), max_dates=2)),
            arch=ARCH,
            out_indices=(1, 3),
        ),
        (),
        (64, 64),
        2,
        [
            0.49635,
            1.35244,
            0.99064,
            -0.80302,
            0.71056,
            -0.79978,
            1.58942,
            1.60855,
            -0.01068,
            0.79195,
            -0.39844,
            0.10454,
            1.22557,
            0.00195,
            0.01091,
            1.48729,
        ],
    ),
    'dofa v1': (
        DOFA,
        dict(
            sensors=dict(drone=dict(bands=(1, 2, 3, 4, 5))),
            wavelengths=dict(drone=[0.475, 0.56, 0.668, 0.717, 0.84]),
            mean=dict(drone=[110.0] * 5),
            std=dict(drone=[60.0] * 5),
            arch=ARCH,
            out_indices=(1, 3),
        ),
        (),
        (224, 224),
        1,
        [
            0.00336,
            1.20594,
            -0.20234,
            1.91213,
            1.31657,
            -1.31138,
            0.12672,
            1.44175,
            0.00183,
            1.75344,
            -1.92089,
            3.56194,
            0.6015,
            -1.95164,
            0.20498,
            4.70582,
        ],
    ),
    'dofa v2': (
        DOFA,
        dict(
            sensors=dict(s2=dict(bands=('B12', 'B02'))),
            arch=dict(ARCH, patch_size=14, version=2),
            out_indices=(1, 3),
        ),
        (),
        (224, 224),
        1,
        [
            -0.00037,
            0.54134,
            0.69126,
            -0.12287,
            -0.18409,
            1.31639,
            0.06984,
            -0.47435,
            0.01536,
            0.57416,
            1.04831,
            -0.28323,
            -0.32854,
            1.7369,
            0.36601,
            -0.40804,
        ],
    ),
}


@pytest.mark.parametrize('name', CASES)
def test_features_have_the_published_values(name: str) -> None:
    kind, settings, names, shape, dates, expected = CASES[name]
    encoder = fill(kind(**settings), lambda key: rename(key, names))
    layout = encoder.layout
    of_dofa = dict(s2=120.0) if kind is DOFA else {}
    pixels = images(
        layout, shape, dict(CENTER, **of_dofa), dict(SPREAD, **dict.fromkeys(of_dofa, 110.0))
    )
    with torch.no_grad():
        maps = encoder(
            pixels
            if dates == 1
            else stack(layout, pixels, {sensor.name: DATES[:dates] for sensor in layout.sensors})
        )
    assert summarize(maps) == pytest.approx(expected, abs=3e-5)
