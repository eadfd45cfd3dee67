"""The model of a prediction from a config and a checkpoint, on the ranks that share the work."""
from __future__ import annotations

import argparse
from typing import Any, Callable, Dict, Optional, Tuple

from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from torch import nn

from mapsage.accelerator import Accelerator
from mapsage.distributed import all_ranks_or_none, local_rank, open_channel
from mapsage.distributed.nodes.launcher_notes import note_for_launcher
from mapsage.engine.env_cfg import parse_env_cfg
from mapsage.engine.ranks import startup
from mapsage.maps.description import Bands, Classes
from mapsage.maps.errors import PredictError
from mapsage.maps.model import (
    default_window,
    file_hash,
    find_bands,
    find_classes,
    load_weights,
    settings_of,
)
from mapsage.maps.parts import key_of
from mapsage.maps.predictor import WindowPredictor
from mapsage.maps.strips import Predictor
from mapsage.wrappers import place_module
from mapsage.wrappers.memory_layout import put_channels_last

from .config_checks import build_model, read_config
from .predict_compute import choose_batch, choose_precision

# Ranks wait for each other after they have predicted their parts, which may take unequally long.
_TIMEOUT_SECONDS = 7 * 24 * 3600


class CheckpointModel:
    """Implements :class:`mapsage.commands.predict.MapModel` by a checkpoint.

    Args:
        args: Options of tools/predict.py.
        say: Function that prints a line.

    Attributes:
        config: The config that the command line names.
    """

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._args = args
        self.config = read_config(args)
        self._accelerator = self._start()
        self._channel = open_channel(timeout=_TIMEOUT_SECONDS)
        self.rank, self.world_size = self._channel.rank, len(self._channel.ranks)
        self._say = say if self.rank == 0 else lambda line: say(f'[rank {self.rank}] {line}')

    def load(self) -> None:
        """Build the model and place it."""
        args = self._args
        model, self.classes, self.bands = load_model(self.config, args.checkpoint)
        self.window, self.overlap, self.window_from = choose_window(
            self.config, args.window, args.overlap)
        self._amp = choose_precision(self.config, self._accelerator) if args.amp else None
        predictor = WindowPredictor(
            place_module(revert_sync_batchnorm(model), self._accelerator, local_rank()),
            self._accelerator.device(local_rank()), self.window, self.overlap, 1, args.tta,
            self._amp, self._say)
        self.batch_size = predictor.batch_size = choose_batch(
            args.batch_size, self.window, predictor.scores, self._accelerator)
        self.predictor: Predictor = predictor

    def settings(self) -> Dict[str, Any]:
        """Return what of the model a map depends on, as JSON holds it."""
        return dict(checkpoint=file_hash(self._args.checkpoint),
                    model=key_of(dict(model=settings_of(self.config))),
                    **({} if self._amp is None else dict(amp=self._amp_name)))

    def describe(self) -> str:
        """Return how it computes, the end of a line."""
        return (('' if self._amp is None else f', in {self._amp_name} where that serves')
                + f'; {self._accelerator.describe()}')

    def together(self, what: str) -> Any:
        """Return a context in which an error of one rank is raised on all."""
        return all_ranks_or_none(what, timeout=_TIMEOUT_SECONDS)

    def share(self, text: str) -> str:
        """Return rank 0's text on every rank."""
        return self._channel.gather_texts(text)[0]

    def note(self, text: str) -> None:
        """Let the launcher end its output with a text."""
        note_for_launcher(text)

    def _start(self) -> Accelerator:
        env = parse_env_cfg(self.config.get('env_cfg') or {}, self.config.get('model_wrapper_cfg'))
        launcher = self._args.launcher
        startup.identify_process(launcher, env.port)
        accelerator = startup.choose_accelerator(env.accelerator)
        accelerator.set_float32_precision(env.float32_matmul_precision, env.cudnn_allow_tf32)
        # Ranks exchange texts only, so that a vendor's communication need not start.
        startup.join_ranks(launcher, accelerator, 'gloo', env.timeout)
        return accelerator

    @property
    def _amp_name(self) -> str:
        return str(self._amp).replace('torch.', '')


def load_model(cfg: Config, checkpoint: str) -> Tuple[nn.Module, Classes, Bands]:
    """Return the model of a config with a checkpoint's weights, its classes and its bands."""
    model = build_model(cfg)
    meta = load_weights(model, checkpoint)
    if parse_env_cfg(cfg.get('env_cfg') or {}).channels_last:
        put_channels_last(model)
    return model, find_classes(cfg, meta, model), find_bands(cfg, model)


def choose_window(cfg: Config, window: Optional[int],
                  overlap: Optional[int]) -> Tuple[Tuple[int, int], int, str]:
    """Return height and width of the windows, what neighbors share, in pixels, and who says so.

    Raises:
        PredictError: If the overlap does not fit the window.
    """
    size, why = default_window(cfg) if window is None else ((window, window), '--window')
    shared = min(size) // 4 if overlap is None else overlap
    if min(size) < 1 or not 0 <= shared < min(size):
        raise PredictError(f'--window {size[1]} and --overlap {shared}: expected a window of 1 or '
                           f'more pixels and an overlap of 0 to {min(size) - 1}.')
    return size, shared, why
