"""Let QGIS' Deepness plugin make a map with an exported model, and compare it with predict's.

    apt-get install python3-qgis
    git clone https://github.com/PUTvision/qgis-plugin-deepness DEEPNESS
    python tools/export.py CONFIG CHECKPOINT --out model.onnx --window 256
    python tools/predict.py CONFIG CHECKPOINT scene.tif --out map --window 256

    # With a pip of the version of Python that QGIS belongs to:
    pip install --target PACKAGES onnxruntime==1.17.0 'numpy<2' 'opencv-python-headless<=4.9.0.80'
    export PYTHONPATH=PACKAGES
    /usr/bin/python3 tests/conformance/deepness_map.py DEEPNESS model.onnx scene.tif map/scene.tif

Without a scene and a map, no QGIS is needed: Deepness' class for segmentation reads the file and
runs it. With them, the plugin's whole processor maps the scene in QGIS without a screen. It does
not blend its tiles, so that the maps may differ where predict blends. The exit status is 0 when
the file says of itself what it should, and 99 % of the pixels farther than half the overlap from
any tile's edge are of the same class.

A model sees a pixel with what surrounds it in its window, and predict spreads its windows evenly.
They lie where the tiles of Deepness do only where these end with the scene, as tiles of 256 pixels
with an overlap of 64 do in the 1,024 of the demo's; elsewhere both answer from other windows, and
the program says so.

The scene needs square pixels in a CRS of meters. A model that does not know the size of its pixels
takes those of the scene.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np

LEAST_EQUAL = 0.99
NO_DATA = 255


def main() -> int:
    """Run both comparisons and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('checkout', type=Path, help="folder of a checkout of Deepness' repository")
    parser.add_argument('model', help='file of tools/export.py --target qgis')
    parser.add_argument('scene', nargs='?', help='scene to map')
    parser.add_argument('map', nargs='?', help='map of the scene by tools/predict.py')
    args = parser.parse_args()
    if args.scene and not args.map:
        parser.error(f'{args.scene}: its map by tools/predict.py is missing')
    source = args.checkout / 'src'
    if not (source / 'deepness').is_dir():
        parser.error(
            f'{source} has no folder deepness: expected a checkout of '
            f'https://github.com/PUTvision/qgis-plugin-deepness'
        )
    sys.path.insert(0, str(source))
    problems = read_and_run(args.model)
    if args.scene:
        problems += compare_maps(args.model, args.scene, args.map)
    for problem in problems:
        print(f'differs: {problem}')
    sys.stdout.flush()
    return 1 if problems else 0


def read_and_run(path: str) -> List[str]:
    """Read and run a file with Deepness' class alone; return what differs from its description."""
    from deepness.processing.models.segmentor import Segmentor

    model = Segmentor(path)
    assert not any(name.split('.')[0] == 'qgis' for name in sys.modules)
    description = json.loads(model.sess.get_modelmeta().custom_metadata_map['mapsage'])
    side, one = description['window'], description['scores'] == 1
    bands = description['bands']['count']
    pairs = [
        ('model type', model.get_metadata_model_type(), 'Segmentor'),
        ('class names', model.outputs_names, [description['classes']]),
        ('tile size', model.get_metadata_tile_size(), side),
        ('input size', list(model.get_input_size_in_pixels()), [side, side]),
        ('batch size', model.get_model_batch_size(), description['batch']),
        (
            'overlap in %',
            model.get_metadata_tiles_overlap(),
            round(100 * description['overlap'] / side),
        ),
        (
            'threshold',
            model.get_metadata_segmentation_threshold(),
            description['threshold'] if one else 0,
        ),
        ('median filter', model.get_metadata_segmentation_small_segment(), 0),
        ('channels', model.get_number_of_channels(), bands),
        ('classes', model.get_number_of_output_channels(), [len(description['classes'])]),
        ('one score', model.outputs_are_sigmoid, [one]),
    ]
    image = np.random.default_rng(0).integers(
        0, 256, (description['batch'] or 2, side, side, bands), dtype=np.uint8
    )
    scores = model.process(image)[0]
    wanted = model.sess.run(
        None, {model.input_name: image.transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)}
    )[0]
    difference = float(np.abs(scores - wanted).max())
    print(
        f'Segmentor without QGIS: {len(pairs)} values read, resolution '
        f'{model.get_metadata_resolution()} cm, scores {list(scores.shape)}, largest difference '
        f'from ONNX Runtime alone {difference:.1e}'
    )
    found = [
        f'{name} is {value!r}, expected {expected!r}'
        for name, value, expected in pairs
        if value != expected
    ]
    return found + ([] if difference <= 1e-4 else [f'scores, by {difference:.1e}'])


def compare_maps(model: str, scene: str, own_map: str) -> List[str]:
    """Compare the maps of both, and return what differs."""
    from qgis.core import QgsApplication

    application = QgsApplication([], False)
    application.initQgis()
    classes, far, text = make_map(model, scene)
    expected = read_band(own_map)
    if expected.shape != classes.shape:
        return [f'the map has {classes.shape} pixels, {own_map} {expected.shape}']
    valid = expected != NO_DATA
    equal = (classes == expected) & valid
    share = equal[far & valid].mean()
    print(
        f'{text}: {100 * share:.3f} % of the {(far & valid).sum()} pixels that are farther than '
        f"half the overlap from any tile's edge are of the same class, and "
        f'{100 * equal[valid].mean():.3f} % of all {valid.sum()}'
    )
    if text.endswith('past the scene'):
        print("predict's windows lie elsewhere: the maps differ by that, too")
    return [] if share >= LEAST_EQUAL else [f'the map: {100 * share:.3f} % of the pixels are equal']


def make_map(path: str, scene: str) -> Tuple[np.ndarray, np.ndarray, str]:
    """Map a scene with Deepness' processor.

    Returns:
        Classes, uint8 (H, W); which pixels are farther than half the overlap from the edges of all
        tiles, bool (H, W); and a text that says what was run.
    """
    from qgis.core import Qgis, QgsRasterLayer

    with contextlib.redirect_stdout(io.StringIO()):  # a line for each tile
        from deepness.common.channels_mapping import ChannelsMapping, ImageChannelStandaloneBand
        from deepness.common.processing_overlap import ProcessingOverlap, ProcessingOverlapOptions
        from deepness.common.processing_parameters.map_processing_parameters import (
            ProcessedAreaType,
        )
        from deepness.common.processing_parameters.segmentation_parameters import (
            SegmentationParameters,
        )
        from deepness.processing.map_processor.map_processor_segmentation import (
            MapProcessorSegmentation,
        )
        from deepness.processing.models.segmentor import Segmentor

        model, layer = Segmentor(path), QgsRasterLayer(scene, 'scene')
        assert layer.isValid(), f'QGIS cannot read {scene}'
        bands = ChannelsMapping()
        bands.set_image_channels(
            [
                ImageChannelStandaloneBand(number + 1, str(number + 1))
                for number in range(model.get_number_of_channels())
            ]
        )
        bands.set_number_of_model_inputs_same_as_image_channels()
        # All of it as the plugin's button sets it that loads the model's default parameters.
        processor = MapProcessorSegmentation(
            rlayer=layer,
            vlayer_mask=None,
            map_canvas=None,
            params=SegmentationParameters(
                resolution_cm_per_px=(
                    model.get_metadata_resolution() or 100 * layer.rasterUnitsPerPixelX()
                ),
                tile_size_px=model.get_metadata_tile_size(),
                batch_size=model.get_model_batch_size() or 1,
                local_cache=False,
                processed_area_type=ProcessedAreaType.ENTIRE_LAYER,
                mask_layer_id=None,
                input_layer_id=layer.id(),
                input_channels_mapping=bands,
                processing_overlap=ProcessingOverlap(
                    ProcessingOverlapOptions.OVERLAP_IN_PERCENT,
                    percentage=model.get_metadata_tiles_overlap(),
                ),
                postprocessing_dilate_erode_size=model.get_metadata_segmentation_small_segment(),
                pixel_classification__probability_threshold=(
                    model.get_metadata_segmentation_threshold()
                ),
                model=model,
            ),
        )
        processor._run()
    classes = (processor.get_result_img()[0] - 1).astype(np.uint8)  # 0 is for no class
    side, stride = processor.params.tile_size_px, processor.stride_px
    far = [
        far_from_edges(length, tiles, side, stride)
        for length, tiles in zip(classes.shape, (processor.y_bins_number, processor.x_bins_number))
    ]
    past = any((length - side) % stride for length in classes.shape)
    return (
        classes,
        far[0][:, None] & far[1],
        (
            f'Deepness in QGIS {Qgis.QGIS_VERSION}, {processor.x_bins_number} x '
            f'{processor.y_bins_number} tiles of {side} pixels, overlap {side - stride}'
            + ', the last ones past the scene'
            * past
        ),
    )


def far_from_edges(length: int, tiles: int, side: int, stride: int) -> np.ndarray:
    """Return which pixels of an axis are farther than half the overlap from the tiles' edges."""
    middles = np.arange(length) + 0.5
    edges = np.concatenate([np.arange(tiles) * stride, np.arange(tiles) * stride + side])
    return np.abs(middles[:, None] - edges).min(1) > (side - stride) / 2


def read_band(path: str) -> np.ndarray:
    """Return the only band of a map, uint8 (H, W)."""
    from qgis.core import QgsRasterLayer

    layer = QgsRasterLayer(path, 'map')
    assert layer.isValid(), f'QGIS cannot read {path}'
    width, height = layer.width(), layer.height()
    block: Any = layer.dataProvider().block(1, layer.extent(), width, height)
    return np.frombuffer(bytes(block.data()), np.uint8).reshape(height, width)


if __name__ == '__main__':
    os.environ['QT_QPA_PLATFORM'] = 'offscreen'
    status = main()
    sys.stdout.flush()
    os._exit(status)  # QGIS may crash as it ends
