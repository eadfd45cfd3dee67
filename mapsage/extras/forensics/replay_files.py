"""Files of a replayed step: the data of each virtual rank, a table, pictures of the batches.

The table (`step.txt`) is for people: it begins with the answer to the first question, whether the
numbers are the run's own bit for bit. The data (`rank_V.pth`) are for programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch

from mapsage.base.files import atomic_write
from mapsage.extras.forensics.step_recorder import RankStep
from mapsage.pictures import PreviewSample, save_preview

# Number of gradients of a virtual rank in the table.
_LARGEST = 5


@dataclass(frozen=True)
class StepFacts:
    """Facts that all virtual ranks of a step have in common.

    Attributes:
        iteration: Number of the iteration, counted from 1.
        checkpoint: Path of the checkpoint from which the replay started.
        learning_rate: Name -> learning rates of the parameter groups.
        differences: One line for each difference from the conditions under which the checkpoint was
            written; None if the checkpoint does not tell these conditions.
        metainfo: Metainfo of the dataset, with ``classes`` and ``palette`` if it has them.
        bgr: Whether images of three channels are BGR, as OpenCV loads them.
    """

    iteration: int
    checkpoint: str
    learning_rate: Dict[str, List[float]]
    differences: Optional[Sequence[str]] = None
    metainfo: Dict[str, Any] = field(default_factory=dict)
    bgr: bool = True


def write_step(folder: Path, steps: Sequence[RankStep], facts: StepFacts) -> None:
    """Write ``step.txt``, and for each virtual rank V ``rank_V.pth`` and ``rank_V.png``.

    ``torch.load`` reads a ``.pth`` with its defaults: a dict of ``iteration``, ``checkpoint``,
    ``learning_rate``, ``virtual_rank``, ``batch`` (what the loader gave, with a dict in place of
    each data sample), ``losses`` and ``gradient_norms``. There is a picture if the batch has images
    and label maps.

    Args:
        folder: Folder of the files; it exists.
        steps: The recorded step of each virtual rank.
        facts: Facts about all of them.

    Raises:
        OSError: If the folder cannot be written.
    """
    for step in steps:
        torch.save(
            dict(
                iteration=facts.iteration,
                checkpoint=facts.checkpoint,
                learning_rate=facts.learning_rate,
                **vars(step),
            ),
            str(folder / f'rank_{step.virtual_rank}.pth'),
        )
    table = _format_table(steps, facts)
    atomic_write(folder / 'step.txt', table.encode('utf-8', 'backslashreplace'))
    for step in steps:
        samples = _preview_samples(step.batch, facts.bgr)
        if samples:
            classes = facts.metainfo.get('classes') or [
                f'class {index}' for index in range(1 + _largest_class(samples))
            ]
            save_preview(
                str(folder / f'rank_{step.virtual_rank}.png'),
                samples,
                classes,
                facts.metainfo.get('palette'),
                f'iteration {facts.iteration}, virtual rank {step.virtual_rank}',
                _format_losses(step),
                labels='Mask',
            )


def _format_table(steps: Sequence[RankStep], facts: StepFacts) -> str:
    rates = ', '.join(f'{name} {values[0]:.6g}' for name, values in facts.learning_rate.items())
    names = list(dict.fromkeys(name for step in steps for name in step.losses))
    rows = [['virtual rank', *names, 'gradient norm']]
    for step in steps:
        rows.append(
            [
                str(step.virtual_rank),
                *(f'{step.losses.get(name, math.nan):.9g}' for name in names),
                f'{total_norm(step):.6g}',
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        f'iteration {facts.iteration}, {rates}, from {facts.checkpoint}',
        *_describe_exactness(facts.differences),
        '',
        *('  '.join(text.rjust(width) for text, width in zip(row, widths)) for row in rows),
    ]
    for step in steps:
        lines += [
            '',
            f'virtual rank {step.virtual_rank}',
            *_describe_samples(step),
            *_describe_gradients(step),
        ]
    return '\n'.join(lines) + '\n'


def _describe_exactness(differences: Optional[Sequence[str]]) -> List[str]:
    """Return lines that tell whether the numbers are those that the run computed."""
    if differences is None:
        return [
            'The checkpoint does not say on what it was computed: the numbers are close to '
            'those of the run, or equal.'
        ]
    if differences:
        return [
            'Computed otherwise than the run: the numbers are close to its numbers, not equal.',
            *(f'  {difference}' for difference in differences),
        ]
    return ['Computed under the conditions of the run: the numbers are its numbers, bit for bit.']


def total_norm(step: RankStep) -> float:
    """Return the Euclidean norm of all gradients of a virtual rank; NaN without gradients."""
    norms = step.gradient_norms.values()
    return math.sqrt(sum(norm * norm for norm in norms)) if norms else math.nan


def _describe_samples(step: RankStep) -> List[str]:
    """Return a line for each sample of a batch: its index, its seed, its file."""
    lines = []
    for number, sample in enumerate(_data_samples(step.batch)):
        info = sample.get('metainfo', {}) if isinstance(sample, dict) else {}
        index, seed = info.get('sample_key') or ('unknown', ())
        seed_text = f', drawn with {tuple(seed)}' if seed else ''
        path = info.get('img_path', '')
        lines.append(f'  sample {number}: index {index}{seed_text} {path}'.rstrip())
    return lines


def _describe_gradients(step: RankStep) -> List[str]:
    """Return a line about gradients that are not finite, or else about the largest gradients."""
    bad = [name for name, norm in step.gradient_norms.items() if not math.isfinite(norm)]
    if bad:
        return [
            f'  gradients that are not finite: {len(bad)} of {len(step.gradient_norms)}; in '
            f'the order of the backward pass the first is {bad[0]}'
        ]
    largest = sorted(step.gradient_norms.items(), key=lambda item: -item[1])[:_LARGEST]
    return (
        ['  largest gradients: ' + ', '.join(f'{name} {norm:.4g}' for name, norm in largest)]
        if largest
        else []
    )


def _format_losses(step: RankStep) -> str:
    return '   '.join(f'{name} {value:.6g}' for name, value in step.losses.items())


def _data_samples(batch: object) -> Sequence[Any]:
    samples = batch.get('data_samples') if isinstance(batch, dict) else None
    return samples if isinstance(samples, (list, tuple)) else ()


def _preview_samples(batch: object, bgr: bool) -> List[PreviewSample]:
    """Return the images of a batch with their masks; empty if the batch has no images and masks."""
    images = batch.get('inputs') if isinstance(batch, dict) else None
    pairs: List[Tuple[Any, Any]] = (
        list(zip(images, _data_samples(batch)))
        if isinstance(images, (list, tuple, torch.Tensor))
        else []
    )
    previews = []
    for image, sample in pairs:
        mask = sample.get('gt_sem_seg', {}).get('data') if isinstance(sample, dict) else None
        if (
            not isinstance(image, torch.Tensor)
            or not isinstance(mask, torch.Tensor)
            or image.ndim != 3
            or mask.shape[-2:].numel() != mask.numel()
        ):
            return []
        pixels = image.numpy().transpose(1, 2, 0)
        if bgr and pixels.shape[2] == 3:
            pixels = pixels[:, :, ::-1]
        previews.append(
            PreviewSample(
                image=np.ascontiguousarray(pixels[:, :, :3]),
                prediction=mask.reshape(mask.shape[-2:]).numpy().astype(np.int32),
                name=str(sample.get('metainfo', {}).get('img_path', '')),
            )
        )
    return previews


def _largest_class(samples: Sequence[PreviewSample]) -> int:
    """Return the largest class index in the masks; 255 is "no label" in all datasets of MMSeg."""
    labels = np.unique(np.concatenate([sample.prediction.ravel() for sample in samples]))
    return int(labels[(labels >= 0) & (labels < 255)].max(initial=0))
