"""Let GeoAI's ONNXGeoModel read an exported file with its sidecar, and compare a window's classes.

    python -m venv GEOAI    # of Python 3.11 or newer; PyTorch is not needed
    GEOAI/bin/pip install --no-deps geoai-py
    GEOAI/bin/pip install geopandas onnx onnxruntime opencv-python-headless pillow rasterio tqdm
    GEOAI/bin/python tests/conformance/geoai_window.py model.onnx scene.tif

The window has the size of the model's, which GeoAI takes as it is: it shrinks anything up to 1,024
pixels to that size, and averages the class numbers of what is larger. The exit status is 0 when its
class reads what the file says, and every pixel has the class that ONNX Runtime gives it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import geoai
import numpy as np
import rasterio
from geoai.onnx import ONNXGeoModel
from rasterio.windows import Window


def main(path: str, scene: str) -> int:
    """Run the comparison and return the exit status."""
    model = ONNXGeoModel(path)
    description = json.loads(model.session.get_modelmeta().custom_metadata_map['mapsage'])
    side = description['window']
    problems = [
        f'{name} is {value!r}, expected {expected!r}'
        for name, value, expected in (
            ('task', model.task, 'semantic-segmentation'),
            ('labels', list(model.id2label.values()), description['classes']),
            ('size', [model.metadata[key] for key in ('input_height', 'input_width')], [side] * 2),
            ('outputs', model.metadata['output_names'], model.output_names),
        )
        if value != expected
    ]
    with rasterio.open(scene) as file:
        place = Window((file.width - side) // 2, (file.height - side) // 2, side, side)
        image = file.read(window=place)
    with tempfile.TemporaryDirectory() as folder:
        written = str(Path(folder, 'window.tif'))
        model.predict(scene, output_path=written, window=place)
        with rasterio.open(written) as file:
            found = file.read(1)
    scores = model.session.run(None, {model.input_name: image[None] / np.float32(255)})[0][0]
    equal = (found == scores.argmax(0)).mean()
    print(
        f'GeoAI {geoai.__version__}: {len(model.id2label)} classes, a window of {side} pixels: '
        f'{100 * equal:.3f} % of the pixels as ONNX Runtime alone has them'
    )
    for problem in problems:
        print(f'differs: {problem}')
    return 1 if problems or equal < 1 else 0


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
