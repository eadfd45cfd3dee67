"""The model of a prediction from a config and a checkpoint, on all ranks that share the work.

`CheckpointModel` is here and not in `mapsage/maps/`, because it starts the accelerator and joins the
ranks, which only commands may do.
The functions below it choose precision, batch size and windows; tools/suggest_labels.py uses them,
too.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from torch import nn

from mapsage.accelerator import Accelerator, AcceleratorError
from mapsage.distributed import all_ranks_or_none, local_rank, open_channel
from mapsage.distributed.launcher_notes import note_for_launcher
from mapsage.distributed.wrappers import place_module
from mapsage.distributed.wrappers.memory_layout import put_channels_last
from mapsage.distributed.wrappers.optim_wrapper import parse_dtype
from mapsage.engine import startup
from mapsage.engine.env_cfg import parse_env_cfg
from mapsage.geo.passport import passport_of_checkpoint
from mapsage.geo.places import PlaceInputs
from mapsage.maps.description import Bands, Classes
from mapsage.maps.errors import PredictError
from mapsage.maps.map_model import MapModel
from mapsage.maps.model import (
    default_window,
    file_hash,
    find_bands,
    find_classes,
    load_weights,
    place_settings,
    settings_of,
    training_days,
)
from mapsage.maps.places import open_places
from mapsage.maps.predictor import WindowPredictor, dtype_name
from mapsage.maps.strips import key_of

from .cli import build_model, read_config

# Ranks wait for each other after their strips are predicted, which may take unequally long.
_TIMEOUT_SECONDS = 7 * 24 * 3600

# Limits of a batch if the user does not choose one: four windows of 512 pixels, or sixteen on a
# card whose memory size is known; at most 128 MiB of scores, because a few batches of scores wait
# in host memory to be blended; at most 128 MiB of pixels, because a few batches are read ahead; and
# 64 windows.
_PIXELS, _PIXELS_ON_A_CARD = 4 * 512**2, 16 * 512**2
_SCORE_BYTES = 128 << 20
_INPUT_BYTES = 128 << 20
_MOST_WINDOWS = 64


class CheckpointModel(MapModel):
    """A checkpoint as the model of a prediction, on all ranks.

    Args:
        args: Options of tools/predict.py.
        say: Function that prints a line.

    Attributes:
        config: The config that the command line names.
        decisions: Device, batch size, precision, and the batch normalizations that rank 0 found to
            be foldable.
    """

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._args = args
        self.config = read_config(args)
        self._accelerator = start_accelerator(self.config, args.launcher)
        self._channel = open_channel(timeout=_TIMEOUT_SECONDS)
        self.rank, self.world_size = self._channel.rank, len(self._channel.ranks)
        settings = place_settings(self.config)
        self.places = None if settings is None else open_places(settings)
        self._refused_norms: Sequence[str] = ()
        self._say = say if self.rank == 0 else lambda line: say(f'[rank {self.rank}] {line}')

    def load(self) -> None:
        """Build the model and place it on the device of this rank."""
        args = self._args
        model, self.classes, self.bands, meta = load_model_and_meta(self.config, args.checkpoint)
        self.passport, self.passport_problem = passport_of_checkpoint(meta, args.checkpoint)
        if self.places is not None:
            self.places.training_days = training_days(meta)
        self.window, self.overlap, self.window_origin = choose_window(
            self.config, args.window, args.overlap
        )
        amp = self._accelerator.has_16_bit_units() if args.amp is None else args.amp
        self._amp = choose_precision(self.config, self._accelerator) if amp else None
        device = self._accelerator.device(local_rank())
        model = place_module(revert_sync_batchnorm(model), self._accelerator, local_rank())
        if self._amp is not None and device.type != 'cpu' and not self._accelerator.lazy:
            # As the windows in 16 bits: no convolution has to change the layout of its weights.
            put_channels_last(model)
        self.predictor: WindowPredictor = WindowPredictor(
            model,
            device,
            self.window,
            self.overlap,
            1,
            args.tta,
            self._amp,
            self._say,
        )
        self._on_cpu = device.type == 'cpu'
        folded_norms: Sequence[str] = ()
        # Not for places, because random numbers are no dates and no flags.
        if (
            self.rank == 0
            and self._on_cpu
            and self._amp is None
            and not isinstance(self.places, PlaceInputs)
        ):
            folded_norms, self._refused_norms = self.predictor.choose_folds(self.bands.count)
        self.batch_size = choose_batch(
            args.batch_size, self.window, self.predictor.scores, self._accelerator, self.bands.count
        )
        amp_name = None if self._amp is None else dtype_name(self._amp)
        self.required = dict(
            device=self._accelerator.name,
            amp=amp_name,
            **({} if args.batch_size is None else dict(batch_size=args.batch_size)),
        )
        self.decisions = dict(
            self.required, batch_size=self.batch_size, folded_norms=list(folded_norms)
        )

    def prepare(self, decisions: Mapping[str, Any]) -> None:
        """Compute in the chosen precision and, on a CPU, with folded norms and in threads."""
        amp = decisions['amp']
        self.batch_size = self.predictor.batch_size = decisions['batch_size']
        self.predictor.amp = None if amp is None else getattr(torch, amp)
        if self._on_cpu:
            self.predictor.fold_batch_norms(decisions['folded_norms'])
        if self._args.compile:
            self.predictor.compile()
        # A compiled model belongs to one thread.
        elif self._on_cpu:
            self.predictor.use_threads(torch.get_num_threads())

    def settings(self) -> Dict[str, Any]:
        """Return the settings of the model that a map depends on, in types of JSON."""
        return dict(
            checkpoint=file_hash(self._args.checkpoint),
            model=key_of(dict(model=settings_of(self.config))),
            **({} if self._amp is None else dict(amp=dtype_name(self._amp))),
            **(dict(compile=True) if self._args.compile else {}),
            **({} if not self._refused_norms else dict(unfolded_norms=list(self._refused_norms))),
        )

    def describe(self) -> str:
        """Return precision and device as the end of a line."""
        precision = '' if self._amp is None else (f', in {dtype_name(self._amp)} where that serves')
        return f'{precision}; {self._accelerator.describe()}'

    def fail_together(self, task: str) -> AbstractContextManager:
        """Return a context that raises an error of one rank on all ranks."""
        return all_ranks_or_none(task, timeout=_TIMEOUT_SECONDS)

    def gather_texts(self, text: str) -> List[str]:
        """Return the texts of all ranks, in the order of ranks, on every rank. Collective."""
        return self._channel.gather_texts(text)

    def note_for_launcher(self, text: str) -> None:
        """Give the launcher a text to end its output with."""
        note_for_launcher(text)


def start_accelerator(cfg: Config, launcher: str) -> Accelerator:
    """Choose the accelerator that a config names, and join the ranks that the launcher started."""
    env = parse_env_cfg(cfg.get('env_cfg') or {}, cfg.get('model_wrapper_cfg'))
    startup.identify_process(launcher, env.port)
    accelerator = startup.choose_accelerator(env.accelerator)
    accelerator.set_float32_precision(env.float32_matmul_precision, env.cudnn_allow_tf32)
    # Ranks exchange only texts, so the vendor's communication library need not start.
    startup.join_ranks(launcher, accelerator, 'gloo', env.timeout)
    return accelerator


def load_model(cfg: Config, checkpoint: str) -> Tuple[nn.Module, Classes, Bands]:
    """Return the model of a config with a checkpoint's weights, its classes and its bands."""
    return load_model_and_meta(cfg, checkpoint)[:3]


def load_model_and_meta(
    cfg: Config, checkpoint: str
) -> Tuple[nn.Module, Classes, Bands, Dict[str, Any]]:
    """Return what :func:`load_model` does, and the checkpoint's ``meta``."""
    model = build_model(cfg)
    meta = load_weights(model, checkpoint)
    if parse_env_cfg(cfg.get('env_cfg') or {}).channels_last:
        put_channels_last(model)
    return model, find_classes(cfg, meta, model), find_bands(cfg, model), meta


def choose_window(
    cfg: Config, window: Optional[int], overlap: Optional[int]
) -> Tuple[Tuple[int, int], int, str]:
    """Return height and width of windows, the overlap of neighbors, and the origin of the size.

    Args:
        cfg: Config of the model.
        window: Side in pixels that the user chose, or None.
        overlap: Overlap in pixels that the user chose; None for a quarter of a window.

    Raises:
        PredictError: If the overlap does not fit the window.
    """
    size, origin = default_window(cfg) if window is None else ((window, window), '--window')
    shared = min(size) // 4 if overlap is None else overlap
    if min(size) < 1 or not 0 <= shared < min(size):
        raise PredictError(
            f'--window {size[1]} and --overlap {shared}: expected a window of 1 or '
            f'more pixels and an overlap of 0 to {min(size) - 1}.'
        )
    return size, shared, origin


def choose_precision(cfg: Config, accelerator: Accelerator) -> torch.dtype:
    """Return the data type of autocast: the training's, or else the accelerator's default.

    The training's is the ``dtype`` of the config's ``AmpOptimWrapper``. It is not used on an
    accelerator that cannot compute in it, such as float16 on a CPU.
    """
    wrapper = cfg.get('optim_wrapper') or {}
    if str(wrapper.get('type')).rsplit('.', 1)[-1].strip("'>") == 'AmpOptimWrapper':
        dtype = parse_dtype(wrapper.get('dtype'))
        try:
            if dtype is not None:
                accelerator.autocast(dtype)
                return dtype
        except (AcceleratorError, RuntimeError):
            pass
    return accelerator.amp_dtype


def choose_batch(
    chosen: Optional[int],
    window: Tuple[int, int],
    scores: int,
    accelerator: Accelerator,
    bands: int = 3,
) -> int:
    """Return the number of windows that are predicted at a time.

    Args:
        chosen: Number that the user chose, or None.
        window: Height and width of a window in pixels.
        scores: Number of scores of a pixel.
        accelerator: Accelerator that computes.
        bands: Number of bands that the model takes.
    """
    if chosen is not None:
        return chosen
    pixels = window[0] * window[1]
    pixel_budget = _PIXELS if accelerator.memory_total() is None else _PIXELS_ON_A_CARD
    score_bytes = 4 * scores * pixels
    return max(
        1,
        min(
            pixel_budget // pixels,
            _SCORE_BYTES // score_bytes,
            _INPUT_BYTES // (4 * bands * pixels),
            _MOST_WINDOWS,
        ),
    )
