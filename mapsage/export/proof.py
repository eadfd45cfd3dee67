"""Whether a file computes what the model does, on tiles of the validation set."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import onnx
import torch
from torch import nn

from mapsage.inference.description import Bands, ExportedDescription
from mapsage.inference.exported import to_input

from .errors import ExportError
from .graph import INPUT, open_session, traced_bytes

# Float32 in another order of sums differs by 1e-7 to 2e-5 in the models that were tried.
MOST_DIFFERENCE, LEAST_EQUAL = 1e-3, 0.999
_TOGETHER = 3  # tiles in a batch, where it may have any size; the last batch is another
_IGNORED = 255


@dataclass(frozen=True)
class Tile:
    """A window of an image of the validation set.

    Attributes:
        image: ``(bands, S, S)`` uint8 or float32, in the order of the test pipeline.
        labels: ``(S, S)`` int64, 255 where there is no label.
    """

    image: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Proof:
    """A comparison of a file with the model it was made from.

    Attributes:
        tiles: Number of tiles.
        largest: Largest difference of a score.
        equal: Share of the pixels that get the same class.
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
        """Whether the file may be written."""
        return self.largest <= MOST_DIFFERENCE and self.equal >= LEAST_EQUAL

    def __str__(self) -> str:
        scores = ('without labels' if np.isnan(self.before) else
                  f'mIoU {self.before:.2f} (PyTorch) and {self.after:.2f} (ONNX Runtime)')
        return (f'{self.tiles} tile{"s" * (self.tiles > 1)} of the val set: largest difference '
                f'{self.largest:.1e}, equal pixels {100 * self.equal:.4f} %, {scores}')


def take_tiles(dataset: Any, window: int, count: int) -> List[Tile]:
    """Return tiles of a dataset, evenly spread over its images and over each of them.

    Args:
        dataset: Dataset of MMSegmentation with its test pipeline.
        window: Side of a tile in pixels; smaller images are mirrored.
        count: Number of tiles.
    """
    tiles: List[Tile] = []
    for number in range(count):
        item = dataset[number * len(dataset) // count]
        image = np.asarray(item['inputs'])
        labels: np.ndarray = np.full(image.shape[1:], _IGNORED, np.int64)
        truth = getattr(item['data_samples'], 'gt_sem_seg', None)
        if truth is not None:
            labels = _to_size(np.asarray(truth.data).squeeze(0).astype(np.int64), image.shape[1:])
        for axis in (1, 2):
            # the fractional part of multiples of the golden ratio spreads places evenly
            start = int(number * 0.618034 % 1 * max(1, image.shape[axis] - window + 1))
            image = np.take(image, range(start, min(start + window, image.shape[axis])), axis)
            labels = np.take(labels, range(start, min(start + window, labels.shape[axis - 1])),
                             axis - 1)
        missing = [(0, window - image.shape[axis]) for axis in (1, 2)]
        tiles.append(Tile(np.pad(image, [(0, 0), *missing], mode='symmetric'),
                          np.pad(labels, missing, constant_values=_IGNORED)))
    return tiles


def prove(model: onnx.ModelProto, description: ExportedDescription,
          reference: Callable[[torch.Tensor], np.ndarray], tiles: Sequence[Tile]) -> Proof:
    """Run a file in ONNX Runtime on tiles and compare it with what predict computes.

    Args:
        model: The file.
        description: Its description.
        reference: Function that returns scores, float32 (N, scores, S, S), of windows.
        tiles: Tiles to compare on.

    Raises:
        ExportError: If ONNX Runtime cannot run it, or the model's scores are no numbers.
    """
    session = open_session(model.SerializeToString())
    largest, equal = 0., 0
    before, after = (np.zeros((len(description.classes), ) * 2, np.int64) for _ in range(2))
    step = description.batch or _TOGETHER
    for first in range(0, len(tiles), step):
        part = list(tiles[first:first + step])
        short = (description.batch or len(part)) - len(part)
        images = np.stack([tile.image for tile in [*part, *part[:1] * short]])
        try:
            found = session.run(None, {INPUT: to_input(images, description.bands)})[0]
        except Exception as error:  # the runtime's own kinds
            raise ExportError(f'ONNX Runtime cannot run the file: {str(error)[:400]}') from error
        for tile, scores in zip(part, found):
            wanted = reference(torch.from_numpy(np.ascontiguousarray(tile.image[None])))[0]
            if not np.isfinite(wanted).all():
                raise ExportError('the model gives scores that are no numbers (NaN or infinity) on '
                                  'a tile of the val set. Look at the losses of its training.')
            difference = float(np.abs(scores - wanted).max())
            # NaN is not larger than anything.
            largest = max(largest, float('inf') if np.isnan(difference) else difference)
            ours, theirs = (_classes(each, description.threshold) for each in (wanted, scores))
            equal += int((ours == theirs).sum())
            for table, classes in ((before, ours), (after, theirs)):
                table += _confusion(tile.labels, classes, len(table))
    pixels = len(tiles) * description.window**2
    return Proof(len(tiles), largest, equal / pixels, _mean_iou(before), _mean_iou(after))


def differing_layer(module: Any, opset: int, tile: Tile, bands: Bands) -> Optional[str]:
    """Return the first layer, in the order of computing, whose export differs on a tile.

    Args:
        module: Module that was exported.
        opset: Opset of the file.
        tile: Tile on which the file differs.
        bands: Bands of the model.

    Returns:
        Name of the layer in the model and its type, or None if none can be told.
    """
    image = torch.from_numpy(to_input(tile.image[None], bands))
    example = torch.rand(image.shape, generator=torch.Generator().manual_seed(1))
    # The exporter returns a module to its mode, and all that is in it: one in training, as a new
    # one is, would put the norms of the model there.
    probe = _Probe(module).eval()
    try:
        with torch.no_grad():
            probe(example)
            names = [f'layer{number}' for number in range(len(probe.found))]
            traced = traced_bytes(probe, example, opset, False, names)
            probe(image)
        wanted = dict(probe.found)
        found = open_session(traced).run(names, {INPUT: image.numpy()})
    except Exception:  # what is looked for here is only a hint
        return None
    finally:
        probe.remove()
    for (layer, tensor), value in zip(wanted.items(), found):
        expected = tensor.numpy()
        scale = max(1., float(np.abs(expected).max()))
        if expected.shape != value.shape or not np.abs(value - expected).max() <= 1e-3 * scale:
            return layer
    return None


class _Probe(nn.Module):
    """A module that returns what each of its layers returned, once a layer, in order."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.found: Dict[str, torch.Tensor] = {}
        self._hooks = [each.register_forward_hook(self._keep(name, each))
                       for name, each in module.named_modules() if name]

    def forward(self, image: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Return the outputs of all layers that are tensors of floats."""
        self.found.clear()
        self.module(image)
        return tuple(self.found.values())

    def remove(self) -> None:
        """Take the hooks out again."""
        for hook in self._hooks:
            hook.remove()

    def _keep(self, name: str, layer: nn.Module) -> Callable[..., None]:
        key = f"{name.replace('model.', '', 1)} ({type(layer).__name__})"

        def keep(_: nn.Module, inputs: Any, output: Any) -> None:
            parts = output if isinstance(output, (tuple, list)) else [output]
            for number, part in enumerate(parts):
                # Old exporters cannot write one tensor as two outputs, as of an identity.
                if isinstance(part, torch.Tensor) and part.is_floating_point() and not any(
                        part is known for known in self.found.values()):
                    self.found.setdefault(f'{key}{" output " * (number > 0)}{number or ""}', part)

        return keep


def _classes(scores: np.ndarray, threshold: float) -> np.ndarray:
    return scores.argmax(0) if len(scores) > 1 else (scores[0] > threshold).astype(np.int64)


def _confusion(labels: np.ndarray, classes: np.ndarray, count: int) -> np.ndarray:
    known = (labels >= 0) & (labels < count)
    return np.bincount(labels[known] * count + classes[known],
                       minlength=count * count).reshape(count, count)


def _mean_iou(table: np.ndarray) -> float:
    inside = np.diag(table)
    union = table.sum(0) + table.sum(1) - inside
    shown = union > 0
    return 100 * float((inside[shown] / union[shown]).mean()) if shown.any() else float('nan')


def _to_size(labels: np.ndarray, size: Tuple[int, ...]) -> np.ndarray:
    """Return labels in the size of the image, which a pipeline may have resized without them."""
    rows, columns = (((np.arange(there) + 0.5) * here / there).astype(np.intp)
                     for here, there in zip(labels.shape, size))
    return labels[rows[:, None], columns]
