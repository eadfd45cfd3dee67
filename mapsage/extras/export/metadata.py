"""Descriptions of an exported file for the programs that read it.

Every reader wants its own: MapSage and QGIS' Deepness read metadata inside the file (`describe`),
GeoAI a JSON file next to it (`geoai_sidecar`), catalogs a STAC item (`mlm_item`).
"""

from __future__ import annotations

import datetime
import json
import re
from typing import Any, Dict, List, Optional

import onnx

from mapsage.maps.description import KEY, ExportedDescription
from mapsage.maps.file_inputs import IMAGE, inputs_of, layout_of

from .graph import OUTPUT

# The item has the required properties of https://github.com/stac-extensions/mlm.
_MLM = 'https://stac-extensions.github.io/mlm/v1.5.0/schema.json'


def describe(
    model: onnx.ModelProto, description: ExportedDescription, gsd: Optional[float]
) -> None:
    """Write the description, and the keys of QGIS' Deepness plugin, into a file's metadata.

    All values are JSON. Deepness sets scores below ``seg_thresh`` to 0 before it takes the argmax,
    so several classes need 0; for a single score it is the threshold of class 1. Deepness always
    divides by 255, which is why the graph multiplies by 255. It would also normalize with two keys
    that are left out here, because the graph normalizes. ``seg_small_segment=0`` turns off its
    median blur. A file of scene stacks, which Deepness does not read, has none of its keys.

    Args:
        model: File to describe.
        description: Description that tools/predict.py reads.
        gsd: Side of a training pixel in meters; None if unknown.
    """
    del model.metadata_props[:]
    if description.places is not None:
        onnx.helper.set_model_props(model, {KEY: description.to_text()})
        return
    is_binary = description.scores == 1
    keys: Dict[str, Any] = dict(
        model_type='Segmentor',
        class_names={str(number): name for number, name in enumerate(description.classes)},
        tile_size=description.window,
        tiles_overlap=round(100 * description.overlap / description.window),
        seg_thresh=description.threshold if is_binary else 0,
        seg_small_segment=0,
    )
    if gsd is not None:
        # Deepness expects centimeters.
        keys['resolution'] = 100 * gsd
    onnx.helper.set_model_props(
        model,
        {**{key: json.dumps(value) for key, value in keys.items()}, KEY: description.to_text()},
    )


def geoai_sidecar(model: onnx.ModelProto, description: ExportedDescription) -> Dict[str, Any]:
    """Return the content of ``model.onnx.json``, which GeoAI's ``ONNXGeoModel`` reads."""
    return dict(
        task='semantic-segmentation',
        num_labels=len(description.classes),
        id2label={str(number): name for number, name in enumerate(description.classes)},
        input_height=description.window,
        input_width=description.window,
        input_channels=description.bands.count,
        opset_version=model.opset_import[0].version,
        output_names=[OUTPUT],
    )


def mlm_item(
    model: onnx.ModelProto,
    description: ExportedDescription,
    name: str,
    file: str,
    architecture: str,
    parameters: int,
    gsd: Optional[float],
) -> Dict[str, Any]:
    """Return a STAC item of the Machine Learning Model extension for a file.

    Args:
        model: The exported model.
        description: Description of the file.
        name: Name of the model.
        file: Name of the file, in the same folder as the item.
        architecture: Names of the backbone and the head.
        parameters: Number of weights.
        gsd: Side of a pixel in meters; None if unknown.
    """
    side, batch = description.window, -1 if description.batch is None else description.batch
    inputs = inputs_of(description)
    bands = _band_names(description)
    properties: Dict[str, Any] = {
        'datetime': datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%dT%H:%M:%SZ'),
        'bands': [dict(name=band) for names in bands.values() for band in names],
        'mlm:name': _mlm_name(name),
        'mlm:architecture': architecture,
        'mlm:tasks': ['semantic-segmentation'],
        'mlm:framework': 'ONNX',
        'mlm:total_parameters': parameters,
        'mlm:input': [
            dict(
                name=value.name,
                bands=bands.get(value.name, []),
                input=_array([batch, *inputs.shapes[value.name]], inputs.axes[value.name]),
                value_scaling=[dict(type='scale', value=255)] if value.name == IMAGE else None,
                resize_type=None,
            )
            for value in model.graph.input
        ],
        'mlm:output': [
            dict(
                name=OUTPUT,
                tasks=['semantic-segmentation'],
                result=_array(
                    [batch, description.scores, side, side], ['batch', 'classes', 'height', 'width']
                ),
                **{'classification:classes': _classes(description)},
            )
        ],
    }
    if gsd is not None:
        properties['gsd'] = gsd
    return dict(
        type='Feature',
        stac_version='1.1.0',
        stac_extensions=[_MLM],
        id=name,
        geometry=None,
        properties=properties,
        links=[],
        assets=dict(
            model={
                'href': f'./{file}',
                'type': 'application/octet-stream; application=onnx',
                'title': f'ONNX, opset {model.opset_import[0].version}',
                'roles': ['mlm:model'],
                'mlm:artifact_type': 'onnx',
            }
        ),
    )


def _band_names(description: ExportedDescription) -> Dict[str, List[str]]:
    """Return the names of the bands of each input that has bands; those of stacks name the sensor."""
    layout = layout_of(description.places)
    if layout is not None:
        return {
            f'{sensor.name}_pixels': [f'{sensor.name} {band}' for band in sensor.bands]
            for sensor in layout.sensors
        }
    if description.bands.like_opencv:
        return {IMAGE: ['red', 'green', 'blue']}
    numbers = description.bands.chosen or range(1, description.bands.count + 1)
    return {IMAGE: [f'band {number}' for number in numbers]}


def _mlm_name(name: str) -> str:
    """Return a name that the extension allows: ASCII, at least three characters."""
    plain = re.sub(r'[^a-zA-Z0-9_.-]+', '-', name).strip('-._')
    return plain if re.match(r'[a-zA-Z].+[a-zA-Z0-9]$', plain) else f'mapsage-{plain}'.strip('-')


def _array(shape: List[int], order: List[str]) -> Dict[str, Any]:
    return dict(shape=shape, dim_order=order, data_type='float32')


def _classes(description: ExportedDescription) -> List[Dict[str, Any]]:
    return [
        dict(value=number, name=name, color_hint='{:02X}{:02X}{:02X}'.format(*color))
        for number, (name, color) in enumerate(zip(description.classes, description.palette))
    ]
