"""Reports of dynamic sampling for the log, the message hub, the visualizer and a folder.

Counts of a step are equal on all ranks, but bytes and times are not; a summary adds these up over
the ranks, so every rank must call it. ``tools/plot_sampling.py`` reads the files of the folder.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Dict, Sequence

from mmengine.dist import is_main_process

from mapsage.distributed import Channel
from mapsage.host.batch_images import ShowsImages, dataset_metainfo, shown_channels
from mapsage.host.log_lines import append_line
from mapsage.host.runner import HostRunner, hooks_of_type
from mapsage.sampling import Candidate, Scorer, StepStatistics, Totals

from .tile_gallery import TileGallery

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
