"""An exported model: windows in, weighted scores out, by ONNX Runtime or OpenVINO.

Nothing here needs PyTorch or the MM packages.
"""
from __future__ import annotations

import os
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from mapsage_launcher.shipped import program

from .description import Bands, ExportedDescription
from .errors import PredictError
from .windows import blend_weights

RUNTIMES = ('onnxruntime', 'openvino')

# Providers of ONNX Runtime that are used where they are, in this order.
_PROVIDERS = ('TopsInferenceExecutionProvider', 'CUDAExecutionProvider', 'CPUExecutionProvider')
_FLIPS: Tuple[Tuple[int, ...], ...] = ((), (3, ), (2, ), (2, 3))  # of (batch, bands, h, w)
_SCORE_BYTES, _PIXELS, _MOST_WINDOWS = 128 << 20, 4 * 512**2, 64  # of a batch, as with checkpoints

Compute = Callable[[np.ndarray], np.ndarray]


class ExportedPredictor:
    """Computes weighted scores of windows as :class:`mapsage.maps.predictor.WindowPredictor`.

    Args:
        path: File that tools/export.py wrote.
        runtime: Program that runs it, one of :data:`RUNTIMES`.
        overlap: Pixels over which the weights rise from the edges of a window; None for those of
            the file.
        batch_size: Largest number of windows in a batch, None to choose.
        tta: Whether to average over the window and its three mirror images.

    Attributes:
        description: What the file says of itself.
        overlap: Pixels that neighbors share.
        batch_size: Number of windows that are computed at a time.
        scores: Number of scores of a pixel.
        threshold: Score from which on a model with one score means class 1.
        weights: ``(side, side)`` float32 factors of the scores.
        device: What computes, in words.

    Raises:
        PredictError: If the runtime is not there, the file cannot be read or is not ours, or it
            has a fixed batch and another is asked for.
    """

    def __init__(self, path: str, runtime: str = 'onnxruntime', overlap: Optional[int] = None,
                 batch_size: Optional[int] = None, tta: bool = False) -> None:
        try:
            with open(path, 'rb') as file:
                content = file.read()  # runtimes cannot open every name that the system can
        except OSError as error:
            raise PredictError(f'model {path} cannot be read: {error.strerror}.') from error
        opened = {'onnxruntime': _open_onnxruntime, 'openvino': _open_openvino}[runtime]
        metadata, shape, self._compute, self.device = opened(content, path)
        self.description = ExportedDescription.from_metadata(metadata, path)
        side, count = self.description.window, self.description.bands.count
        if list(shape)[1:] != [count, side, side]:
            raise PredictError(f'{path} takes {list(shape)}, and its description says {count} '
                               f'bands and windows of {side} pixels. Write the file again with '
                               f'`{program("export")}`.')
        self.overlap = self.description.overlap if overlap is None else overlap
        if not 0 <= self.overlap < side:
            raise PredictError(f'--overlap {self.overlap}: expected 0 to {side - 1}, as the file '
                               f'has windows of {side} pixels.')
        fixed = self.description.batch
        if batch_size is not None and fixed not in (None, batch_size):
            raise PredictError(f'--batch-size {batch_size}: {path} takes {fixed} window(s) at a '
                               f'time. Leave it out, or export the model again with --batch '
                               f'{batch_size}.')
        self.scores, self.threshold = self.description.scores, self.description.threshold
        self.batch_size = fixed or batch_size or max(1, min(
            _PIXELS // side**2, _SCORE_BYTES // (4 * self.scores * side**2), _MOST_WINDOWS))
        self.weights = np.outer(*(blend_weights(side, self.overlap), ) * 2)
        self._flips = _FLIPS if tta else _FLIPS[:1]

    def __call__(self, windows: np.ndarray) -> np.ndarray:
        """Return the weighted scores of a batch of windows.

        Args:
            windows: ``(batch, bands, side, side)`` uint8 or float32, bands in the order of the test
                pipeline.

        Returns:
            ``(batch, scores, side, side)`` float32.

        Raises:
            PredictError: If the runtime cannot compute.
        """
        images = to_input(windows, self.description.bands)
        missing = (self.description.batch or 0) - len(windows)
        if missing > 0:
            images = np.concatenate([images, np.zeros((missing, *images.shape[1:]), np.float32)])
        try:
            total = self._compute(images)
            for flip in self._flips[1:]:
                turned = self._compute(np.ascontiguousarray(np.flip(images, flip)))
                total = total + np.flip(turned, flip)
        except Exception as error:  # the runtimes' own kinds
            hint = '' if self.description.batch else ' With --batch-size 1 it needs least memory.'
            raise PredictError(f'{self.device} cannot compute {len(windows)} window(s): '
                               f'{_beginning(error)}.{hint}') from error
        total = total[:len(windows)]
        return total * (self.weights / np.float32(len(self._flips)))


def to_input(windows: np.ndarray, bands: Bands) -> np.ndarray:
    """Return windows in the order of the test pipeline as a file takes them: RGB in 0..1."""
    turned = windows[:, ::-1] if bands.like_opencv else windows
    return np.ascontiguousarray(turned, np.float32) / np.float32(255)


def threads() -> int:
    """Return OMP_NUM_THREADS, which runtimes do not read by themselves; 0 lets them choose."""
    asked = os.environ.get('OMP_NUM_THREADS', '')
    return int(asked) if asked.isdigit() else 0


def _beginning(error: Exception) -> str:
    """Return what a runtime says, on one line."""
    return ' '.join(str(error).split())[:400].rstrip('. ')


def _open_onnxruntime(content: bytes, path: str) -> Tuple[Dict[str, str], List[Any], Compute, str]:
    try:
        import onnxruntime
    except ImportError as error:
        raise PredictError(f'--model needs ONNX Runtime: pip install onnxruntime ({error}).'
                           ) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is raised
    options.intra_op_num_threads = threads()
    present = onnxruntime.get_available_providers()
    providers = [name for name in _PROVIDERS if name in present]
    try:
        session = onnxruntime.InferenceSession(content, options, providers=providers)
    except Exception as error:  # the runtime's own kinds
        raise PredictError(
            f'ONNX Runtime {onnxruntime.__version__} cannot read {path}: {_beginning(error)}. '
            f'Where it is too old for the file, install a newer one, or export the model with '
            f'--target qgis.') from error
    value = session.get_inputs()[0]

    def compute(images: np.ndarray) -> np.ndarray:
        return session.run(None, {value.name: images})[0]

    name = session.get_providers()[0].replace('ExecutionProvider', '')
    return (dict(session.get_modelmeta().custom_metadata_map), value.shape, compute,
            f'ONNX Runtime {onnxruntime.__version__} ({name})')


def _open_openvino(content: bytes, path: str) -> Tuple[Dict[str, str], List[Any], Compute, str]:
    """Open a file in OpenVINO, in float32: by itself it would take 16 bits where a CPU has them."""
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
    except Exception as error:  # the runtime's own kinds
        raise PredictError(f'OpenVINO cannot read {path}: {_beginning(error)}.') from error
    # It puts what a file of ONNX says of itself under this name.
    metadata = (dict(model.get_rt_info('framework').value)
                if model.has_rt_info('framework') else {})
    shape = [side.get_length() if side.is_static else str(side)
             for side in model.input(0).partial_shape]

    def compute(images: np.ndarray) -> np.ndarray:
        return compiled(images)[compiled.output(0)]

    return metadata, shape, compute, f'OpenVINO {openvino.__version__.split("-")[0]} (CPU, float32)'
