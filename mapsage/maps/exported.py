"""An exported model as the model of a prediction, run by ONNX Runtime or OpenVINO.

`ExportedModel` is the model of a map and computes its scores. Nothing here needs PyTorch or the MM
packages: predictions from an exported file run on machines without them.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from mapsage.base.errors import UserError
from mapsage.geo.passport import read_passport
from mapsage_launcher.shipped import program

from .description import ExportedDescription
from .errors import PredictError
from .file_inputs import inputs_of
from .map_model import MapModel, Predictor, Scores
from .places import open_places
from .windows import blend_weights

RUNTIMES = ('onnxruntime', 'openvino')

# Providers of ONNX Runtime in the order of preference.
_PROVIDERS = ('TopsInferenceExecutionProvider', 'CUDAExecutionProvider', 'CPUExecutionProvider')
# Axes of (batch, bands, height, width) along which a view is mirrored.
_FLIPS: Tuple[Tuple[int, ...], ...] = ((), (3,), (2,), (2, 3))
# Limits of a batch, as for checkpoints on a CPU.
_SCORE_BYTES, _INPUT_BYTES, _PIXELS, _MOST_WINDOWS = 128 << 20, 128 << 20, 4 * 512**2, 64
# Bytes that are hashed at a time.
_BLOCK = 1 << 20

Compute = Callable[[Dict[str, np.ndarray]], np.ndarray]


class _OpenedFile(NamedTuple):
    """A file in a runtime.

    Attributes:
        metadata: Metadata of the file.
        shapes: Shape of each input by its name, a number or a name for each side.
        compute: Function that returns the scores for the inputs by name.
        device: Name and version of the runtime, and its device.
    """

    metadata: Dict[str, str]
    shapes: Dict[str, List[Any]]
    compute: Compute
    device: str


class ExportedModel(MapModel, Predictor):
    """A file of tools/export.py as the model of a prediction, in one process.

    Several processes are several jobs, which share their maps (`sharing.py`).

    It computes weighted scores as :class:`mapsage.maps.predictor.WindowPredictor` does.

    Args:
        path: File that tools/export.py wrote.
        runtime: Program that runs the file, one of :data:`RUNTIMES`.
        overlap: Pixels over which the weights rise from the edges of a window; None for the
            overlap in the file.
        batch_size: Largest number of windows in a batch; None to choose one.
        tta: Whether to average over the window and its three mirror images.
        window: Side of a window that the user expects, or None.

    Attributes:
        description: Description in the metadata of the file.

    Raises:
        PredictError: If the runtime is not installed, the file cannot be read or was not written by
            tools/export.py, or its fixed batch is not ``batch_size``.
    """

    def __init__(
        self,
        path: str,
        runtime: str = 'onnxruntime',
        overlap: Optional[int] = None,
        batch_size: Optional[int] = None,
        tta: bool = False,
        window: Optional[int] = None,
    ) -> None:
        self._path, self._expected_window = path, window
        try:
            # Passed as bytes, because runtimes cannot open every name that the system can.
            with open(path, 'rb') as file:
                content = file.read()
        except OSError as error:
            raise PredictError(f'model {path} cannot be read: {error.strerror}.') from error
        open_model = {'onnxruntime': _open_onnxruntime, 'openvino': _open_openvino}[runtime]
        opened = open_model(content, path)
        self._compute, self._device = opened.compute, opened.device
        self.description = ExportedDescription.from_metadata(opened.metadata, path)
        side = self.description.window
        try:
            self._inputs = inputs_of(self.description)
        except UserError as error:
            raise PredictError(f'{path}: {error}') from error
        expected = self._inputs.shapes
        if {name: tuple(shape[1:]) for name, shape in opened.shapes.items()} != expected:
            raise PredictError(
                f'{path} takes {opened.shapes}, and its description says {expected} '
                f'for each window. Write the file again with '
                f'`{program("export")}`.'
            )
        self.overlap = self.description.overlap if overlap is None else overlap
        if not 0 <= self.overlap < side:
            raise PredictError(
                f'--overlap {self.overlap}: expected 0 to {side - 1}, as the file '
                f'has windows of {side} pixels.'
            )
        fixed = self.description.batch
        if batch_size is not None and fixed not in (None, batch_size):
            raise PredictError(
                f'--batch-size {batch_size}: {path} takes {fixed} window(s) at a '
                f'time. Leave it out, or export the model again with --batch '
                f'{batch_size}.'
            )
        self.scores, self.threshold = self.description.scores, self.description.threshold
        self.batch_size = (
            fixed
            or batch_size
            or max(
                1,
                min(
                    _PIXELS // side**2,
                    _SCORE_BYTES // (4 * self.scores * side**2),
                    _INPUT_BYTES // (4 * self.description.bands.count * side**2),
                    _MOST_WINDOWS,
                ),
            )
        )
        self.required = dict(device=self._device)
        if batch_size is not None:
            self.required['batch_size'] = self.batch_size
        self.decisions = dict(self.required, batch_size=self.batch_size)
        self.weights = np.outer(*(blend_weights(side, self.overlap),) * 2)
        self._flips = _FLIPS if tta else _FLIPS[:1]
        self.predictor = self
        places = self.description.places
        if places is not None:
            self.places = open_places(places)
            self.places.training_days = places['training_days']

    def __call__(self, windows: Scores) -> np.ndarray:
        """Return the weighted scores of a batch of windows.

        Args:
            windows: ``(batch, bands, side, side)`` uint8 or float32, bands in the order of the test
                pipeline.

        Returns:
            ``(batch, scores, side, side)`` float32.

        Raises:
            PredictError: If the runtime cannot compute.
        """
        images = np.asarray(windows)
        missing = (self.description.batch or 0) - len(windows)
        if missing > 0:
            images = np.concatenate([images, np.zeros((missing, *images.shape[1:]), images.dtype)])
        try:
            total = self._compute(self._inputs.of_windows(images))
            for flip in self._flips[1:]:
                mirrored = self._compute(self._inputs.of_windows(np.flip(images, flip)))
                total = total + np.flip(mirrored, flip)
        # The runtimes' error classes have no common base.
        except Exception as error:
            hint = '' if self.description.batch else ' With --batch-size 1 it needs least memory.'
            raise PredictError(
                f'{self._device} cannot compute {len(windows)} window(s): '
                f'{_first_line(error)}.{hint}'
            ) from error
        total = total[: len(windows)]
        return total * (self.weights / np.float32(len(self._flips)))

    def load(self) -> None:
        """Set what the file says.

        Raises:
            PredictError: If the file takes windows of another size.
        """
        side = self.description.window
        if self._expected_window not in (None, side):
            raise PredictError(
                f'--window {self._expected_window}: {self._path} takes windows of '
                f'{side} pixels. Export it again with --window '
                f'{self._expected_window}.'
            )
        self.classes, self.bands = self.description.as_classes(), self.description.bands
        self.window, self.window_origin = (side, side), f'those of {self._path}'
        self.passport, self.passport_problem = read_passport(self.description.passport, self._path)

    def prepare(self, decisions: Mapping[str, Any]) -> None:
        """Compute as many windows at a time as the first job decided."""
        self.batch_size = decisions['batch_size']

    def settings(self) -> Dict[str, Any]:
        """Return the settings of the model that a map depends on, in types of JSON."""
        digest = hashlib.sha256()
        with open(self._path, 'rb') as file:
            for block in iter(lambda: file.read(_BLOCK), b''):
                digest.update(block)
        return dict(checkpoint=self.description.checkpoint, model=digest.hexdigest())

    def describe(self) -> str:
        """Return the runtime as the end of a line."""
        return f'; {self._device}'


def threads() -> int:
    """Return OMP_NUM_THREADS, which runtimes do not read by themselves; 0 lets them choose."""
    number = os.environ.get('OMP_NUM_THREADS', '')
    return int(number) if number.isdigit() else 0


def _first_line(error: Exception) -> str:
    """Return the beginning of a runtime's message on one line."""
    return ' '.join(str(error).split())[:400].rstrip('. ')


def _open_onnxruntime(content: bytes, path: str) -> _OpenedFile:
    try:
        import onnxruntime
    except ImportError as error:
        raise PredictError(
            f'--model needs ONNX Runtime: pip install onnxruntime ({error}).'
        ) from error
    options = onnxruntime.SessionOptions()
    # Only fatal errors are logged; all errors are raised.
    options.log_severity_level = 4
    options.intra_op_num_threads = threads()
    available = onnxruntime.get_available_providers()
    providers = [name for name in _PROVIDERS if name in available]
    try:
        session = onnxruntime.InferenceSession(content, options, providers=providers)
    # The runtime's error classes have no common base.
    except Exception as error:
        raise PredictError(
            f'ONNX Runtime {onnxruntime.__version__} cannot read {path}: {_first_line(error)}. '
            f'If it is too old for the file, install a newer one, or export the model with '
            f'--target qgis.'
        ) from error

    def compute(inputs: Dict[str, np.ndarray]) -> np.ndarray:
        return session.run(None, inputs)[0]

    name = session.get_providers()[0].replace('ExecutionProvider', '')
    return _OpenedFile(
        dict(session.get_modelmeta().custom_metadata_map),
        {value.name: list(value.shape) for value in session.get_inputs()},
        compute,
        f'ONNX Runtime {onnxruntime.__version__} ({name})',
    )


def _open_openvino(content: bytes, path: str) -> _OpenedFile:
    """Open a file in OpenVINO, in float32: by default it computes in 16 bits on CPUs with them."""
    try:
        import openvino
    except ImportError as error:
        raise PredictError(f'--runtime openvino needs pip install openvino ({error}).') from error
    settings: Dict[str, Any] = dict(INFERENCE_PRECISION_HINT='f32')
    if threads():
        settings['INFERENCE_NUM_THREADS'] = threads()
    try:
        core = openvino.Core()
        model = core.read_model(content)
        compiled = core.compile_model(model, 'CPU', settings)
    # The runtime's error classes have no common base.
    except Exception as error:
        raise PredictError(f'OpenVINO cannot read {path}: {_first_line(error)}.') from error
    # OpenVINO stores the metadata of an ONNX file under this name.
    metadata = dict(model.get_rt_info('framework').value) if model.has_rt_info('framework') else {}
    shapes = {
        value.get_any_name(): [
            side.get_length() if side.is_static else str(side) for side in value.partial_shape
        ]
        for value in model.inputs
    }

    def compute(inputs: Dict[str, np.ndarray]) -> np.ndarray:
        return compiled(inputs)[compiled.output(0)]

    return _OpenedFile(
        metadata, shapes, compute, f'OpenVINO {openvino.__version__.split("-")[0]} (CPU, float32)'
    )
