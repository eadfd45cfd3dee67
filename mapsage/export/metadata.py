"""What a file says of itself, in the words of each program that reads it."""
from __future__ import annotations

import datetime
import json
import re
from typing import Any, Dict, List, Optional

import onnx

from mapsage.inference.description import KEY, ExportedDescription

from .graph import INPUT, OUTPUT

# https://github.com/stac-extensions/mlm, whose required properties the item has.
_MLM = 'https://stac-extensions.github.io/mlm/v1.5.0/schema.json'


def describe(model: onnx.ModelProto, description: ExportedDescription,
             gsd: Optional[float]) -> None:
    """Write the description, and the keys of QGIS' Deepness plugin, into a file's metadata.

    Each value is JSON. Deepness sets scores below ``seg_thresh`` to 0 before it looks for the
    largest, so that 0 is right for several classes; of one score, it is what makes class 1. It
    divides by 255 always, which is why the graph multiplies by it, and normalizes by two keys that
    are left out here. ``seg_small_segment=0`` turns its median blur off.

    Args:
        model: File to describe.
        description: What predict needs to know.
        gsd: Side of a pixel of the training in meters, None if it is not known.
    """
    del model.metadata_props[:]
    one = description.scores == 1
    keys: Dict[str, Any] = dict(
        model_type='Segmentor',
        class_names={str(number): name for number, name in enumerate(description.classes)},
        tile_size=description.window,
        tiles_overlap=round(100 * description.overlap / description.window),
        seg_thresh=description.threshold if one else 0,
        seg_small_segment=0)
    if gsd is not None:
        keys['resolution'] = 100 * gsd  # in centimeters
    onnx.helper.set_model_props(model, {**{key: json.dumps(value) for key, value in keys.items()},
                                        KEY: description.to_text()})


def geoai_sidecar(model: onnx.ModelProto, description: ExportedDescription) -> Dict[str, Any]:
    """Return what GeoAI's ``ONNXGeoModel`` reads beside ``model.onnx``, ``model.onnx.json``."""
    return dict(
        task='semantic-segmentation', num_labels=len(description.classes),
        id2label={str(number): name for number, name in enumerate(description.classes)},
        input_height=description.window, input_width=description.window,
        input_channels=description.bands.count, opset_version=model.opset_import[0].version,
        output_names=[OUTPUT])


def mlm_item(model: onnx.ModelProto, description: ExportedDescription, name: str, file: str,
             architecture: str, parameters: int, gsd: Optional[float]) -> Dict[str, Any]:
    """Return a STAC item of the Machine Learning Model extension for a file.

    Args:
        model: The file.
        description: Its description.
        name: Name of the model.
        file: Name of the file, which lies beside the item.
        architecture: Names of the backbone and the head.
        parameters: Number of the weights.
        gsd: Side of a pixel in meters, None if it is not known.
    """
    bands, side = description.bands.count, description.window
    batch = -1 if description.batch is None else description.batch
    names = ['red', 'green', 'blue'] if description.bands.like_opencv else [
        f'band {number}' for number in description.bands.chosen or range(1, bands + 1)]
    properties: Dict[str, Any] = {
        'datetime': datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%dT%H:%M:%SZ'),
        'bands': [dict(name=each) for each in names],
        'mlm:name': _mlm_name(name),
        'mlm:architecture': architecture,
        'mlm:tasks': ['semantic-segmentation'],
        'mlm:framework': 'ONNX',
        'mlm:total_parameters': parameters,
        'mlm:input': [dict(
            name=INPUT, bands=names,
            input=_array([batch, bands, side, side], ['batch', 'bands', 'height', 'width']),
            value_scaling=[dict(type='scale', value=255)], resize_type=None)],
        'mlm:output': [dict(
            name=OUTPUT, tasks=['semantic-segmentation'],
            result=_array([batch, description.scores, side, side],
                          ['batch', 'classes', 'height', 'width']),
            **{'classification:classes': _classes(description)})]}
    if gsd is not None:
        properties['gsd'] = gsd
    return dict(
        type='Feature', stac_version='1.1.0', stac_extensions=[_MLM], id=name, geometry=None,
        properties=properties, links=[], assets=dict(model={
            'href': f'./{file}', 'type': 'application/octet-stream; application=onnx',
            'title': f'ONNX, opset {model.opset_import[0].version}', 'roles': ['mlm:model'],
            'mlm:artifact_type': 'onnx'}))


def _mlm_name(name: str) -> str:
    """Return a name as the extension allows it: three letters of ASCII or more."""
    plain = re.sub(r'[^a-zA-Z0-9_.-]+', '-', name).strip('-._')
    return plain if re.match(r'[a-zA-Z].+[a-zA-Z0-9]$', plain) else f'mapsage-{plain}'.strip('-')


def _array(shape: List[int], order: List[str]) -> Dict[str, Any]:
    return dict(shape=shape, dim_order=order, data_type='float32')


def _classes(description: ExportedDescription) -> List[Dict[str, Any]]:
    return [dict(value=number, name=name, color_hint='{:02X}{:02X}{:02X}'.format(*color))
            for number, (name, color) in enumerate(zip(description.classes, description.palette))]
