"""A model that expects other sensors or bands than its dataset has is an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Dict

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, TensorDataset

from mapsage.engine.loading.data_checks import DataError
from mapsage.engine.loading.input_checks import compare_sensors
from mapsage.geo.stacks import StackLayout

SENSORS: Dict[str, Any] = dict(
    s2=dict(bands=['B02', 'B03', 'B04'], max_dates=2), s1=dict(bands=[1, 2])
)


class Stacks(TensorDataset):
    """Dataset with sensors and one sample."""

    def __init__(self, **sensors: Any) -> None:
        super().__init__(torch.zeros(1))
        self.layout = StackLayout.of_config(dict(SENSORS, **sensors))


def model_of(**sensors: Any) -> nn.Module:
    model = nn.Module()
    model.backbone = nn.Module()
    model.backbone.layout = StackLayout.of_config(dict(SENSORS, **sensors))
    return model


def test_equal_sensors_and_other_names_of_bands_pass() -> None:
    compare_sensors(model_of(), Stacks())
    compare_sensors(model_of(s2=dict(bands=['B2', 'b3', 'RED'], max_dates=2)), Stacks())
    compare_sensors(model_of(s1=dict(bands=['VV', 'VH'])), Stacks())
    compare_sensors(model_of(), SimpleNamespace())


@pytest.mark.parametrize(
    'sensors, message',
    [
        (
            dict(s2=dict(bands=['B04', 'B03', 'B02'], max_dates=2)),
            r"'s2' has the bands \['B04', 'B03', 'B02'\] in the model, and \['B02', 'B03', 'B04'\]",
        ),
        (dict(s2=dict(bands=['B02', 'B03'], max_dates=2)), r"'s2' has 2 band\(s\) and max_dates=2"),
        (
            dict(s2=dict(bands=['B02', 'B03', 'B04'], max_dates=3)),
            'max_dates=3 in the model, and 3 an',
        ),
        (
            dict(dem=dict(bands=['dem'])),
            r"has \['dem', 's1', 's2'\], and the dataset \['s1', 's2'\]",
        ),
    ],
)
def test_other_sensors_are_errors_that_name_them(sensors: Dict[str, Any], message: str) -> None:
    wrapped = nn.Module()
    wrapped.module = model_of(**sensors)
    with pytest.raises(DataError, match=r'^model\.backbone and Stacks.*' + message):
        compare_sensors(wrapped, ConcatDataset([Stacks()]))
