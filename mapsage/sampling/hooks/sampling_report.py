"""Reports of dynamic sampling for the log, the message hub, the visualizer and a folder.

Counts of a step are equal on all ranks, but bytes and times are not; a summary adds these up over
the ranks, so every rank must call it. ``tools/plot_sampling.py`` reads the files of the folder.

A filter can drop what a training needs: a gallery of small pictures of kept and dropped tiles shows
it. It holds only the latest tiles, at most one of each kind per step, so adding to it costs little.
``tools/plot_sampling.py`` draws the file.
"""

from __future__ import annotations

import io
import json
import time
from collections import deque
from pathlib import Path
from typing import Any, Deque, Dict, NamedTuple, Sequence

import numpy as np
import torch
from mmengine.dist import is_main_process

from mapsage.base.files import atomic_write
from mapsage.datasets.label_score import label_map
from mapsage.distributed import Channel
from mapsage.host.batch_images import (
    Channels,
    ShowsImages,
    choose_channels,
    dataset_metainfo,
    shown_channels,
)
from mapsage.host.log_lines import append_line
from mapsage.host.runner import HostRunner, hooks_of_type
from mapsage.pictures.tiles import display_rgb
from mapsage.sampling import Candidate, Scorer, StepStatistics, Totals

# Folder in the work dir, and first component of every scalar's name.
FOLDER = 'dynamic_sampling'


class SamplingReport:
    """Sums over the steps up to each summary, and a gallery of tiles, written by the first rank.

    Args:
        runner: Runner of the training.
        channel: Channel to the ranks that sample together.
        global_target: Number of samples in a step, summed over all ranks.
        scorer: What scores the samples; it may have pictures.
    """

    def __init__(
        self, runner: HostRunner, channel: Channel, global_target: int, scorer: Scorer
    ) -> None:
        self._runner, self._channel, self._global_target = runner, channel, global_target
        self._scorer = scorer
        self._totals = Totals()
        self._since = time.perf_counter()
        self._metainfo = dataset_metainfo(runner.train_dataloader)
        orders = [hook.input_channel_order for hook in hooks_of_type(runner, ShowsImages)]
        self._channels = shown_channels(runner.cfg, next(iter(orders), None))
        self._gallery = TileGallery(self._channels) if is_main_process() else None

    def add(self, statistics: StepStatistics) -> None:
        """Add a step to the sums."""
        self._totals.add(statistics)
        for name, value in (
            ('attempts', statistics.attempts),
            ('moved_samples', statistics.moved_samples),
            ('seconds', statistics.seconds),
        ):
            self._runner.message_hub.update_scalar(f'{FOLDER}/step/{name}', value)

    def observe(self, group: Sequence[Candidate], reason: str, step: int) -> None:
        """Offer a judged group to the gallery, on the first rank."""
        if self._gallery is not None:
            self._gallery.add(group[0], reason, step)

    def summarize(self) -> None:
        """Write a report of the steps since the last one. Collective."""
        totals = self._totals.over_ranks(self._channel)
        self._totals.clear()
        if not is_main_process():
            return
        self._runner.logger.info(totals.summary())
        if totals.lost:
            self._runner.logger.error(
                f'[DynSample] the account does not balance: {totals.lost} of {totals.fetched} '
                f'samples drawn were neither trained on, nor dropped for a reason, nor are they in '
                f'the pool. This is a defect of dynamic sampling: please report it with this log.'
            )
        iteration, seconds = self._runner.iter + 1, time.perf_counter()
        row = dict(
            vars(totals),
            iter=iteration,
            interval_seconds=seconds - self._since,
            world_size=len(self._channel.ranks),
            global_target=self._global_target,
        )
        self._since = seconds
        append_line(str(self._folder() / 'steps.jsonl'), json.dumps(row))
        scalars = {f'{FOLDER}/{name}': value for name, value in _scalars(totals).items()}
        for name, value in scalars.items():
            self._runner.message_hub.update_scalar(name, value)
        self._runner.visualizer.add_scalars(scalars, step=iteration)

    def save_gallery(self) -> None:
        """Write the gallery and the scorer's pictures, on the first rank."""
        if self._gallery is not None:
            self._gallery.save(
                self._folder() / 'tiles.npz',
                self._metainfo.get('classes') or (),
                self._metainfo.get('palette') or (),
            )
            self._scorer.save_pictures(self._folder(), self._metainfo, self._channels)

    def _folder(self) -> Path:
        folder = Path(self._runner.work_dir) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _scalars(totals: Totals) -> Dict[str, float]:
    """Return means per step of frequent events, and counts of rare ones."""
    steps = max(1, totals.steps)
    scalars: Dict[str, float] = {
        'attempts': totals.attempts / steps,
        'moved_samples': totals.moved_samples / steps,
        'moved_bytes': totals.sent_bytes / steps,
        'seconds': totals.seconds / steps,
        'surplus': totals.surplus,
    }
    if totals.judged:
        scalars['pass_rate'] = totals.pass_rate
    scalars.update({f'shortfalls/{policy}': n for policy, n in totals.shortfalls.items()})
    scalars.update({f'dropped/{reason}': n for reason, n in totals.dropped.items()})
    return scalars


# Side of a picture in pixels.
SIDE = 96
# Number of tiles of each kind in the gallery: the latest ones.
LENGTH = 24
# Number of steps between two tiles of a kind, once the gallery is full.
_PAUSE = 4
_IGNORED = 255


class _GalleryTile(NamedTuple):
    image: np.ndarray
    labels: np.ndarray
    score: float
    iteration: int
    reason: str


class TileGallery:
    """Some of the latest tiles kept and dropped, at most one of each kind per step.

    Args:
        channels: Channels of the samples' images to show, see ``shown_channels``.
    """

    def __init__(self, channels: Channels = None) -> None:
        self._channels = channels
        self._tiles: Dict[str, Deque[_GalleryTile]] = {
            'kept': deque(maxlen=LENGTH),
            'dropped': deque(maxlen=LENGTH),
        }

    def add(self, candidate: Candidate, reason: str, iteration: int) -> None:
        """Keep a small picture of a tile, unless the gallery has one of its kind and iteration.

        Args:
            candidate: Tile with packed inputs, (B, H, W) of any type; 8-bit values are kept, others
                are stretched between the 2nd and 98th percentile of the tile.
            reason: Reason why it is dropped, ``''`` if it is kept.
            iteration: Number of the iteration, from 1.
        """
        tiles = self._tiles['dropped' if reason else 'kept']
        pause = _PAUSE if len(tiles) == LENGTH else 1
        if tiles and iteration - tiles[-1].iteration < pause:
            return
        sample = candidate.sample
        inputs = sample.get('inputs') if isinstance(sample, dict) else None
        labels = label_map(candidate.sample)
        if (
            not isinstance(inputs, torch.Tensor)
            or inputs.dim() != 3
            or 0 in inputs.shape
            or labels is None
        ):
            return
        image = _shrink(choose_channels(inputs.cpu().numpy().transpose(1, 2, 0), self._channels))
        score = float('nan') if candidate.score is None else float(candidate.score)
        tiles.append(
            _GalleryTile(
                _center(display_rgb(image), 0),
                _center(_shrink(labels).clip(0, 255), _IGNORED),
                score,
                iteration,
                reason,
            )
        )

    def save(self, path: Path, classes: Sequence[str], palette: Sequence[Any]) -> None:
        """Write the file for ``tools/plot_sampling.py``, completely or not at all.

        Args:
            path: Path of the file, ``.npz``.
            classes: Names of the classes.
            palette: Colors of the classes, (N, 3); a palette of another form is left out.
        """
        arrays: Dict[str, np.ndarray] = dict(
            classes=np.array(list(classes), dtype=str), palette=_as_rgb(palette)
        )
        for kind in self._tiles:
            # A copy, because another thread may be sampling the next step.
            tiles = list(self._tiles[kind])
            arrays[f'{kind}_images'] = np.array([tile.image for tile in tiles], np.uint8).reshape(
                -1, SIDE, SIDE, 3
            )
            arrays[f'{kind}_labels'] = np.array([tile.labels for tile in tiles], np.uint8).reshape(
                -1, SIDE, SIDE
            )
            arrays[f'{kind}_scores'] = np.array([tile.score for tile in tiles], np.float64)
            arrays[f'{kind}_iters'] = np.array([tile.iteration for tile in tiles], np.int64)
            arrays[f'{kind}_reasons'] = np.array([tile.reason for tile in tiles], dtype=str)
        data = io.BytesIO()
        np.savez_compressed(data, **arrays)  # type: ignore[arg-type]
        atomic_write(path, data.getvalue())


def _as_rgb(palette: Sequence[Any]) -> np.ndarray:
    """Return (N, 3) uint8 colors; empty if the dataset's palette is something else."""
    try:
        colors: Any = np.array(palette, np.uint8)
    except (TypeError, ValueError):
        # MMSegmentation also takes the name of a palette.
        colors = np.empty(0)
    return colors if colors.ndim == 2 and colors.shape[1] == 3 else np.empty((0, 3), np.uint8)


def _shrink(array: np.ndarray) -> np.ndarray:
    """Return a tile of at most SIDE pixels a side, from nearest pixels, so labels stay labels."""
    height, width = array.shape[:2]
    scale = min(1.0, SIDE / max(height, width))
    rows, columns = (
        np.arange(max(1, int(side * scale))) * side // max(1, int(side * scale))
        for side in (height, width)
    )
    return array[np.ix_(rows, columns)]


def _center(small: np.ndarray, fill: int) -> np.ndarray:
    """Return an array in the middle of a square of SIDE, uint8."""
    square = np.full((SIDE, SIDE) + small.shape[2:], fill, np.uint8)
    height, width = small.shape[:2]
    top, left = (SIDE - height) // 2, (SIDE - width) // 2
    square[top : top + height, left : left + width] = small
    return square
