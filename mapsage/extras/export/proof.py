"""Proof that an exported file computes the same as its model, on tiles of the validation set.

`prove` runs both and compares scores, classes and mIoU. If they differ, `differing_layer` exports
the outputs of all layers and names the first one that differs.

Shapes:
    image   (bands, S, S)   a tile, as the test pipeline returns it
    labels  (S, S)          255 without a label
    scores  (scores, S, S)  of a tile; one score for a binary model with one output
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import onnx
import torch
from torch import nn

from mapsage.geo.stacks import StackLayout
from mapsage.maps.description import ExportedDescription
from mapsage.maps.file_inputs import inputs_of

from .errors import ExportError
from .graph import open_session, traced_bytes
from .module import WindowToScores, with_gaps

# Summing float32 in another order changed the scores of the tested models by 1e-7 to 2e-5.
MOST_DIFFERENCE, LEAST_EQUAL = 1e-3, 0.999
# Batch size if the file takes any. A number of tiles that is no multiple of 3 tests a second size.
_BATCH = 3
_IGNORED = 255


@dataclass(frozen=True)
class Tile:
    """A window of a validation image.

    Attributes:
        image: ``(bands, S, S)`` uint8 or float32, bands in the order of the test pipeline; of a
            scene stack the whole input of the model, with planes of days and site.
        labels: ``(S, S)`` int64, 255 without a label.
    """

    image: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Proof:
    """Comparison of a file with the model it was exported from.

    Attributes:
        tiles: Number of tiles.
        largest: Largest difference of a score.
        equal: Share of pixels with the same class.
        before, after: mIoU of the model and of the file on the tiles, in percent; NaN without
            labels.
    """

    tiles: int
    largest: float
    equal: float
    before: float
    after: float

    @property
    def holds(self) -> bool:
        """Whether model and file agree, so that the file may be written."""
        return self.largest <= MOST_DIFFERENCE and self.equal >= LEAST_EQUAL

    def __str__(self) -> str:
        scores = (
            'without labels'
            if np.isnan(self.before)
            else f'mIoU {self.before:.2f} (PyTorch) and {self.after:.2f} (ONNX Runtime)'
        )
        return (
            f'{self.tiles} tile{"s" * (self.tiles > 1)} of the val set: largest difference '
            f'{self.largest:.1e}, equal pixels {100 * self.equal:.4f} %, {scores}'
        )


def take_tiles(
    dataset: Any, window: int, count: int, layout: Optional[StackLayout] = None
) -> List[Tile]:
    """Return tiles of a dataset, spread evenly over the images and within them.

    Half of the tiles of scene stacks, in even and in odd places, are changed: they lack the last
    date of each sensor, and a quarter of the first one as under a cloud.

    Args:
        dataset: Dataset of MMSegmentation with its test pipeline.
        window: Side of a tile in pixels; smaller images are padded by mirroring.
        count: Number of tiles.
        layout: Order of the channels of scene stacks; None for single scenes.
    """
    tiles: List[Tile] = []
    for number in range(count):
        item = dataset[number * len(dataset) // count]
        image = np.asarray(item['inputs'])
        if layout is not None:
            image = layout.append_planes(
                image, item['data_samples'].days, item['data_samples'].site
            )
        labels: np.ndarray = np.full(image.shape[1:], _IGNORED, np.int64)
        truth = item['data_samples'].get('gt_sem_seg')
        if truth is not None:
            labels = _resize_nearest(
                np.asarray(truth.data).squeeze(0).astype(np.int64), image.shape[1:]
            )
        for axis in (1, 2):
            # Fractional parts of multiples of the golden ratio are spread evenly over 0 to 1.
            start = int(number * 0.618034 % 1 * max(1, image.shape[axis] - window + 1))
            image = np.take(image, range(start, min(start + window, image.shape[axis])), axis)
            labels = np.take(
                labels, range(start, min(start + window, labels.shape[axis - 1])), axis - 1
            )
        missing = [(0, window - image.shape[axis]) for axis in (1, 2)]
        image = np.pad(image, [(0, 0), *missing], mode='symmetric')
        if layout is not None and number % 4 in (1, 2):
            image = with_gaps(layout, image)
        tiles.append(Tile(image, np.pad(labels, missing, constant_values=_IGNORED)))
    return tiles


def prove(
    model: onnx.ModelProto,
    description: ExportedDescription,
    reference: Callable[[torch.Tensor], np.ndarray],
    tiles: Sequence[Tile],
) -> Proof:
    """Run a file in ONNX Runtime on tiles and compare the scores with the model's.

    Args:
        model: The exported model.
        description: Description of the file.
        reference: Function that returns the model's scores of windows, float32
            ``(N, bands, S, S)`` -> ``(N, scores, S, S)``.
        tiles: Tiles to compare on.

    Raises:
        ExportError: If ONNX Runtime cannot run the file, or the model's scores are not finite.
    """
    session, inputs = open_session(model.SerializeToString()), inputs_of(description)
    largest, equal = 0.0, 0
    model_confusion, file_confusion = (
        np.zeros((len(description.classes),) * 2, np.int64) for _ in range(2)
    )
    step = description.batch or _BATCH
    for first in range(0, len(tiles), step):
        batch = list(tiles[first : first + step])
        # A file with a fixed batch needs a full last batch.
        fill = (description.batch or len(batch)) - len(batch)
        images = np.stack([tile.image for tile in [*batch, *batch[:1] * fill]])
        try:
            outputs = session.run(None, inputs.of_windows(images))[0]
        except Exception as error:
            # ONNX Runtime raises classes that share no base class with each other.
            raise ExportError(f'ONNX Runtime cannot run the file: {str(error)[:400]}') from error
        for tile, scores in zip(batch, outputs):
            expected = reference(torch.from_numpy(np.ascontiguousarray(tile.image[None])))[0]
            if not np.isfinite(expected).all():
                raise ExportError(
                    'the model gives scores that are no numbers (NaN or infinity) on '
                    'a tile of the val set. Look at the losses of its training.'
                )
            difference = float(np.abs(scores - expected).max())
            # max() would drop a NaN, because no comparison with it is true.
            largest = max(largest, float('inf') if np.isnan(difference) else difference)
            model_classes = _classes(expected, description.threshold)
            file_classes = _classes(scores, description.threshold)
            equal += int((model_classes == file_classes).sum())
            model_confusion += _confusion(tile.labels, model_classes, len(model_confusion))
            file_confusion += _confusion(tile.labels, file_classes, len(file_confusion))
    pixels = len(tiles) * description.window**2
    return Proof(
        len(tiles), largest, equal / pixels, _mean_iou(model_confusion), _mean_iou(file_confusion)
    )


def differing_layer(module: WindowToScores, opset: int, tile: Tile) -> Optional[str]:
    """Return the first layer, in the order of the forward pass, with a different export.

    Args:
        module: Module that was exported.
        opset: Opset of the file.
        tile: Tile on which the file differs.

    Returns:
        Name of the layer in the model and its type; None if no layer differs, or if the layers
        cannot be exported.
    """
    inputs, example = module.inputs.of_windows(tile.image[None]), module.example(1)
    # After the export PyTorch puts a module, with all submodules, back into its former mode. A new
    # module is in training mode, so without eval() the model's norms would end in training mode.
    probe = _LayerOutputs(module).eval()
    try:
        with torch.no_grad():
            probe(*example)
            names = [f'layer{number}' for number in range(len(probe.outputs))]
            traced = traced_bytes(probe, list(module.inputs.shapes), example, opset, False, names)
            probe(*map(torch.from_numpy, inputs.values()))
        expected_outputs = dict(probe.outputs)
        session = open_session(traced)
        # A layer's output may need only some of the inputs.
        file_outputs = session.run(
            names, {value.name: inputs[value.name] for value in session.get_inputs()}
        )
    except Exception:
        # The name of the layer is only a hint in an error message that is raised anyway.
        return None
    finally:
        probe.remove_hooks()
    for (layer, tensor), value in zip(expected_outputs.items(), file_outputs):
        expected = tensor.numpy()
        scale = max(1.0, float(np.abs(expected).max()))
        # Written as "not <=", so that NaN counts as a difference.
        if expected.shape != value.shape or not np.abs(value - expected).max() <= 1e-3 * scale:
            return layer
    return None


class _LayerOutputs(nn.Module):
    """A module that returns the outputs of all layers of another module, in order of execution."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.outputs: Dict[str, torch.Tensor] = {}
        self._hooks = [
            layer.register_forward_hook(self._record_outputs_of(name, layer))
            for name, layer in module.named_modules()
            if name
        ]

    def forward(self, *inputs: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Return the outputs of all layers that are floating-point tensors."""
        self.outputs.clear()
        self.module(*inputs)
        return tuple(self.outputs.values())

    def remove_hooks(self) -> None:
        """Remove the forward hooks from the module."""
        for hook in self._hooks:
            hook.remove()

    def _record_outputs_of(self, name: str, layer: nn.Module) -> Callable[..., None]:
        key = f'{name.replace("model.", "", 1)} ({type(layer).__name__})'

        def record(_: nn.Module, inputs: object, output: object) -> None:
            values = output if isinstance(output, (tuple, list)) else [output]
            for number, value in enumerate(values):
                # Old exporters cannot write one tensor as two outputs, which an identity would
                # cause.
                if (
                    isinstance(value, torch.Tensor)
                    and value.is_floating_point()
                    and not any(value is tensor for tensor in self.outputs.values())
                ):
                    self.outputs.setdefault(
                        f'{key}{" output " * (number > 0)}{number or ""}', value
                    )

        return record


def _classes(scores: np.ndarray, threshold: float) -> np.ndarray:
    return scores.argmax(0) if len(scores) > 1 else (scores[0] > threshold).astype(np.int64)


def _confusion(labels: np.ndarray, classes: np.ndarray, count: int) -> np.ndarray:
    labeled = (labels >= 0) & (labels < count)
    return np.bincount(labels[labeled] * count + classes[labeled], minlength=count * count).reshape(
        count, count
    )


def _mean_iou(confusion: np.ndarray) -> float:
    intersection = np.diag(confusion)
    union = confusion.sum(0) + confusion.sum(1) - intersection
    present = union > 0
    if not present.any():
        return float('nan')
    return 100 * float((intersection[present] / union[present]).mean())


def _resize_nearest(labels: np.ndarray, size: Tuple[int, ...]) -> np.ndarray:
    """Return labels in the size of the image. A test pipeline may resize only the image."""
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(np.intp) for old, new in zip(labels.shape, size)
    )
    return labels[rows[:, None], columns]
