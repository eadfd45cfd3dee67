"""What is written into a stack's channels is what is read out of them."""

import pytest
import torch

from mapsage.geo.stacks import StackLayout, StackLayoutError

_SENSORS = dict(
    s2=dict(bands=['B02', 'B03', 'B04'], max_dates=3), sar=dict(bands=['vv', 'vh'], max_dates=2)
)


def _inputs(layout, site=None):
    torch.manual_seed(0)
    images = torch.rand(2, layout.image_channels, 5, 4)
    images[:, layout.pixel_channels :] = (images[:, layout.pixel_channels :] > 0.5).float()
    days = torch.tensor(
        [[45000.0, 45010.0, 0.0, 45001.0, 0.0], [44000.0, 0.0, 0.0, 44001.0, 44002.0]]
    )
    return images, days, layout.add_planes(images, days, site)


def test_split_returns_what_add_planes_was_given():
    layout = StackLayout.of_config(_SENSORS)
    assert (layout.pixel_channels, layout.image_channels, layout.input_channels) == (13, 18, 25)
    nan = float('nan')
    images, days, inputs = _inputs(layout, torch.tensor([[-179.5, -89.0], [nan, nan]]))
    stack = layout.split(inputs)
    s2, sar = stack.sensors['s2'], stack.sensors['sar']
    assert s2.pixels.shape == (2, 3, 3, 5, 4) and sar.pixels.shape == (2, 2, 2, 5, 4)
    assert torch.equal(s2.pixels[:, 1, 2], images[:, 5])
    assert torch.equal(sar.pixels[:, 1, 0], images[:, 11])
    assert torch.equal(s2.valid[:, 2], images[:, 15] > 0)
    assert torch.equal(sar.valid[:, 1], images[:, 17] > 0)
    assert torch.equal(s2.days, days[:, :3]) and torch.equal(sar.days, days[:, 3:])
    assert stack.longitude[0] == -179.5 and stack.latitude[0] == -89.0
    assert stack.longitude[1].isnan() and stack.latitude[1].isnan()


def test_padding_with_zero_makes_pixels_invalid_and_changes_no_date():
    layout = StackLayout.of_config(_SENSORS)
    _, days, inputs = _inputs(layout)
    stack = layout.split(torch.nn.functional.pad(inputs, (0, 3, 0, 2)))
    assert not stack.sensors['s2'].valid[..., 5:, :].any()
    assert torch.equal(stack.sensors['s2'].days, days[:, :3])
    assert stack.longitude.isnan().all()


def test_values_of_bands_are_repeated_for_each_date():
    layout = StackLayout.of_config(_SENSORS)
    assert layout.per_channel(dict(s2=[1, 2, 3], sar=[4, 5])) == [1, 2, 3] * 3 + [4, 5] * 2
    with pytest.raises(StackLayoutError, match="2 values of sensor 's2', expected 3"):
        layout.per_channel(dict(s2=[1, 2], sar=[4, 5]))
    with pytest.raises(StackLayoutError, match=r"expected those of \['s2', 'sar'\]"):
        layout.per_channel(dict(s2=[1, 2, 3]))


@pytest.mark.parametrize(
    'sensors, message',
    [
        ({}, 'expected at least one'),
        (dict(s2=dict(max_dates=2)), r"sensor 's2' has the keys \['max_dates'\], expected bands"),
        (dict(s2=dict(bands=[], max_dates=2)), r'bands=\[\] and max_dates=2, expected at'),
        (dict(s2=dict(bands=[1], max_dates=0)), r'max_dates=0, expected'),
        (dict(s2=dict(bands=[1], max_dates='six')), "max_dates='six', expected a list"),
        (dict(s2=dict(bands='B02')), "bands='B02' and max_dates=1, expected a list of bands"),
        (dict(s2=dict(bands=3)), 'bands=3 and max_dates=1, expected a list of bands'),
        (dict(s2=None), "sensor 's2' is None, expected its settings"),
        ([dict(bands=[1])], "expected settings by the sensor's name"),
    ],
)
def test_sensors_that_are_none_are_refused(sensors, message):
    with pytest.raises(StackLayoutError, match=message):
        StackLayout.of_config(sensors)


def test_the_order_in_a_config_does_not_count():
    """MMEngine sorts the keys of the config that a run writes into its work dir."""
    first = StackLayout.of_config(_SENSORS)
    second = StackLayout.of_config(dict(reversed(list(_SENSORS.items()))))
    assert list(_SENSORS) == ['s2', 'sar'] and first.sensors == second.sensors


def test_another_number_of_channels_names_both():
    layout = StackLayout.of_config(_SENSORS)
    with pytest.raises(StackLayoutError, match=r'\(1, 3, 8, 8\), expected \(N, 25, H, W\)'):
        layout.split(torch.zeros(1, 3, 8, 8))
