"""Finds models whose sensors are not those of their dataset of scene stacks.

A stack is one image, so a model that expects other bands, or the same bands in another order, would
train on the wrong ones, or fail in its first layer without naming a sensor.
"""

from __future__ import annotations

from typing import Dict, Iterator, Optional, Tuple

from torch import nn

from mapsage.geo.stacks import SensorLayout, StackLayout, canonical_band
from mapsage.host.dataset_parts import parts

from .data_checks import DataError


def compare_sensors(model: nn.Module, dataset: object) -> None:
    """Compare the sensors of each part of a model with those of its training data.

    Bands that one side names and the other numbers are compared by their count only, and so are
    bands with different names, because a band may have several.

    Args:
        model: Model, wrapped or not.
        dataset: Dataset of a loader; other datasets than those of stacks are not compared.

    Raises:
        DataError: If a sensor, its number of dates or bands, or the order of its bands differs.
    """
    for inner in parts(dataset):
        of_dataset = _layout_of(inner)
        if of_dataset is None:
            continue
        for name, layout in _layouts_in(model):
            difference = _difference(of_dataset, layout)
            if difference:
                raise DataError(
                    f'model.{name} and {type(inner).__name__} have different sensors: '
                    f'{difference}. Give both the same sensors, with the bands in '
                    'the same order.'
                )


def _layout_of(part: object) -> Optional[StackLayout]:
    layout = getattr(part, 'layout', None)
    return layout if isinstance(layout, StackLayout) else None


def _layouts_in(model: nn.Module) -> Iterator[Tuple[str, StackLayout]]:
    for name, module in model.named_modules():
        layout = _layout_of(module)
        if layout is not None:
            yield (name[len('module.') :] if name.startswith('module.') else name), layout


def _difference(of_dataset: StackLayout, of_model: StackLayout) -> str:
    """Return how the sensors of a model differ from the dataset's, '' if they do not."""
    expected: Dict[str, SensorLayout] = {sensor.name: sensor for sensor in of_dataset.sensors}
    names = [sensor.name for sensor in of_model.sensors]
    if sorted(expected) != names:
        return f'the model has {names}, and the dataset {sorted(expected)}'
    for sensor in of_model.sensors:
        other = expected[sensor.name]
        if sensor.max_dates != other.max_dates or len(sensor.bands) != len(other.bands):
            return (
                f'{sensor.name!r} has {len(sensor.bands)} band(s) and max_dates='
                f'{sensor.max_dates} in the model, and {len(other.bands)} and '
                f'{other.max_dates} in the dataset'
            )
        bands, others = (list(map(canonical_band, side.bands)) for side in (sensor, other))
        if bands != others and sorted(bands) == sorted(others):
            return (
                f'{sensor.name!r} has the bands {list(sensor.bands)} in the model, and '
                f'{list(other.bands)} in the dataset'
            )
    return ''
