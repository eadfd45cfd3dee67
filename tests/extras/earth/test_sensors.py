"""Which published sensor and band a config's names stand for, and the check of units."""

from __future__ import annotations

import pytest
import torch

from mapsage.extras.earth import DOFA, EarthSensorError, OlmoEarth, PrithviEO, TerraMind
from mapsage.geo.stacks import StackLayoutError
from mapsage.models.backbones.pixels import BackboneInputError

TINY_OE = dict(embed_dims=32, num_layers=2, num_heads=2, pixel_channels=4)
TINY = dict(embed_dims=32, num_layers=2, num_heads=2)


def olmoearth(**sensors: object) -> OlmoEarth:
    return OlmoEarth(
        {name: dict(bands=bands) for name, bands in sensors.items()}, arch=TINY_OE, patch_size=8
    )


def test_bands_are_known_by_several_names() -> None:
    names = [('B02', 'B8A', 'B11'), ('b2', 'b8a', 'B11'), ('BLUE', 'NIR_NARROW', 'SWIR_1')]
    positions = {olmoearth(s2=bands).sensors[0].positions for bands in names}
    assert positions == {(0, None, None, None, None, None, None, 1, 2, None, None, None)}


def test_names_of_sentinel_2_are_not_those_of_landsat() -> None:
    """Landsat's B8 is panchromatic, so 'NIR', which is B8 of Sentinel-2, must not be it."""
    with pytest.raises(EarthSensorError, match=r"does not know \['NIR'\]"):
        olmoearth(landsat=('B8', 'NIR'))


def test_numbers_are_no_names_of_bands() -> None:
    with pytest.raises(
        EarthSensorError,
        match=r"\['1', '2'\].*expected some of the bands of "
        r"sentinel2_l2a, \['B02', ",
    ):
        olmoearth(s2=(1, 2))


def test_a_band_twice() -> None:
    with pytest.raises(EarthSensorError, match='two of them the same'):
        olmoearth(s2=('B02', 'BLUE'))


def test_a_sensor_with_an_unknown_name() -> None:
    with pytest.raises(
        EarthSensorError,
        match=r"knows \['landsat', 'sentinel1', 'sentinel2_l2a'\]"
        r'.*modalities=dict\(summer=',
    ):
        olmoearth(summer=('B02',))
    encoder = OlmoEarth(
        dict(summer=dict(bands=('B02',))), arch=TINY_OE, modalities=dict(summer='sentinel2_l2a')
    )
    assert encoder.sensors[0].published_name == 'sentinel2_l2a'


def test_modalities_of_a_sensor_that_does_not_exist() -> None:
    with pytest.raises(EarthSensorError, match='modalities='):
        OlmoEarth(dict(s2=dict(bands=('B02',))), arch=TINY_OE, modalities=dict(s3='landsat'))


def test_two_sensors_that_are_one() -> None:
    with pytest.raises(EarthSensorError, match="'s2' and 'sentinel-2' are both sentinel2_l2a"):
        OlmoEarth({'s2': dict(bands=('B02',)), 'sentinel-2': dict(bands=('B03',))}, arch=TINY_OE)


def test_prithvi_takes_one_sensor() -> None:
    with pytest.raises(EarthSensorError, match='takes one sensor'):
        PrithviEO(dict(s2=dict(bands=('B02',)), s1=dict(bands=('VV',))), arch=TINY)


def test_bands_of_hls_have_the_names_of_their_product() -> None:
    names = {
        'hls_l30': ('B04', 'B05', 'B06', 'B07', 'B02', 'B03'),
        'HLSL30': ('RED', 'NIR_NARROW', 'SWIR_1', 'SWIR_2', 'BLUE', 'GREEN'),
        'hls_s30': ('B04', 'B8A', 'B11', 'B12', 'B02', 'B03'),
        'hls': ('B04', 'B8A', 'B11', 'B12', 'B02', 'B03'),
    }
    sensors = [
        PrithviEO({name: dict(bands=bands)}, arch=TINY).sensors[0] for name, bands in names.items()
    ]
    assert {sensor.positions for sensor in sensors} == {(4, 5, 0, 1, 2, 3)}
    assert len({(sensor.published.mean, sensor.published.std) for sensor in sensors}) == 1
    named = PrithviEO(dict(x=dict(bands=('B7',))), arch=TINY, modalities=dict(x='HLSL30'))
    assert named.sensors[0].positions == (None, None, None, None, None, 0)
    # B11 of L30 is thermal, and B05 of S30 a red edge.
    for name, band in (('hls_l30', 'B11'), ('hls_l30', 'B8A'), ('hls_s30', 'B05'), ('hls', 'B05')):
        with pytest.raises(EarthSensorError, match=rf"does not know \['{band}'\]"):
            PrithviEO({name: dict(bands=('B02', band))}, arch=TINY)


def test_dofa_names_the_bands_without_wavelengths_and_statistics() -> None:
    with pytest.raises(EarthSensorError, match=r'wavelengths of its bands \[\'a\', \'b\'\]'):
        DOFA(dict(drone=dict(bands=('a', 'b'))), arch=TINY)
    with pytest.raises(EarthSensorError, match=r"mean and std of its bands \['B01'\]"):
        DOFA(dict(s2=dict(bands=('B02', 'B01'))), arch=TINY)
    with pytest.raises(EarthSensorError, match='wavelengths in micrometers'):
        DOFA(
            dict(s2=dict(bands=('a',))),
            arch=TINY,
            wavelengths=dict(s2=[665]),
            mean=dict(s2=[1]),
            std=dict(s2=[1]),
        )
    with pytest.raises(EarthSensorError, match='both mean and std'):
        DOFA(dict(s2=dict(bands=('B02',))), arch=TINY, mean=dict(s2=[1]))
    with pytest.raises(EarthSensorError, match='mean names the sensors'):
        DOFA(dict(s2=dict(bands=('B02',))), arch=TINY, mean=dict(s3=[1]))


@pytest.mark.parametrize('encoder', [OlmoEarth, TerraMind, PrithviEO, DOFA])
def test_an_unknown_arch(encoder: type) -> None:
    with pytest.raises(ValueError, match="arch='huge', expected one of"):
        encoder(dict(s2=dict(bands=('B02',))), arch='huge')
    with pytest.raises(ValueError, match='expected the keys'):
        encoder(dict(s2=dict(bands=('B02',))), arch=dict(depth=3))


def test_out_indices_beyond_the_last_block() -> None:
    with pytest.raises(ValueError, match=r'out_indices=\(1, 2\)'):
        TerraMind(dict(s2=dict(bands=('B02',))), arch=TINY, out_indices=(1, 2))


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        ((0.01, 0.9), 'look like reflectance in 0..1: multiply them by 10000'),
        ((-0.03, 1.2), 'look like reflectance in 0..1: multiply them by 10000'),
        ((-2.0, 2.5), 'take mean and std out of the data preprocessor'),
    ],
)
def test_reflectance_of_another_unit(values: tuple, message: str) -> None:
    encoder = olmoearth(s2=('B02', 'B03'))
    x = torch.linspace(*values, 2 * 2 * 16 * 16).view(2, 2, 16, 16)
    with pytest.raises(BackboneInputError, match=message):
        encoder(x)


def test_linear_backscatter() -> None:
    with pytest.raises(BackboneInputError, match=r'10 \* log10\(value\)'):
        olmoearth(s1=('VV',))(torch.rand(1, 1, 16, 16))


def test_reflectance_for_statistics_of_bytes() -> None:
    encoder = DOFA(dict(s2=dict(bands=('B02',))), arch=TINY)
    with pytest.raises(BackboneInputError, match=r'give mean and std of each band'):
        encoder(torch.full((1, 1, 32, 32), 1200.0))


def test_units_are_checked_at_the_first_batch_with_pixels() -> None:
    """A batch without data says nothing, and later batches are not read."""
    encoder = olmoearth(s2=('B02',))
    encoder(torch.zeros(1, 1, 16, 16))
    with pytest.raises(BackboneInputError):
        encoder(torch.full((1, 1, 16, 16), 0.5))
    encoder(torch.full((1, 1, 16, 16), 1500.0))
    encoder(torch.full((1, 1, 16, 16), 0.5))


def test_a_size_that_does_not_fit() -> None:
    with pytest.raises(BackboneInputError, match='20 x 16 pixels .*multiples of 8'):
        olmoearth(s2=('B02',))(torch.full((1, 1, 20, 16), 1500.0))


def test_a_number_of_channels_that_does_not_fit() -> None:
    with pytest.raises(StackLayoutError, match='same sensors'):
        olmoearth(s2=('B02',))(torch.full((1, 2, 16, 16), 1500.0))
