"""tools/export_eomt.py: an EoMT from a checkpoint as a folder for Hugging Face's transformers.

The folder is written by `mapsage/models/mask_transformers/huggingface_folder.py`; this module
checks that transformers can represent the model at all: three bands in RGB order, square images.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from mmengine.config import Config

from mapsage.engine.env_cfg import ConfigError
from mapsage.maps.model import default_window, find_bands, find_classes, load_weights
from mapsage.models.backbones.dinov3_weights import WeightsError
from mapsage.models.lora import merge_lora
from mapsage.models.lora.adapted import Adapted
from mapsage.models.mask_transformers import EoMT
from mapsage.models.mask_transformers.huggingface_folder import write_huggingface

from . import cli
from .configs import build_model


def export_eomt(args: argparse.Namespace) -> int:
    """Write the folder and print its content.

    Args:
        args: ``config``, ``checkpoint``, ``out`` (folder), ``size`` (side of the images in pixels,
            or None for the config's training size), and the arguments of
            :func:`mapsage.commands.cli.load_config`.

    Returns:
        0, the exit status.

    Raises:
        ConfigError: If the folder exists already, the model is no EoMT, or transformers cannot
            represent it.
        PredictError: If the checkpoint does not fit the model.
    """
    if os.path.exists(args.out):
        raise ConfigError(f'{args.out} exists already: remove it, or give another name.')
    cfg = cli.load_config(args)
    model = build_model(cfg)
    if not isinstance(model, EoMT):
        raise ConfigError(
            f'the model of {args.config} is of the type {cfg.model.type}: expected '
            'EoMT. transformers has no class for PMT or other models of MapSage.'
        )
    bands = find_bands(cfg, model)
    converts_to_rgb = bool((cfg.model.get('data_preprocessor') or {}).get('bgr_to_rgb'))
    if bands.count != 3 or bands.like_opencv != converts_to_rgb:
        raise ConfigError(
            f'the model of {args.config} takes {bands.count} bands that are not in '
            'the order red, green, blue: the image processor of transformers gives '
            'it these three.'
        )
    meta = load_weights(model, args.checkpoint)
    if any(isinstance(module, Adapted) for module in model.modules()):
        merge_lora(model)
    size = args.size or _side(cfg)
    try:
        exported = write_huggingface(
            model, Path(args.out), size, find_classes(cfg, meta, model).names
        )
    except WeightsError as error:
        raise ConfigError(f'{args.checkpoint} cannot be exported: {error}') from error
    print(  # noqa: T201
        f'{args.out}: {exported.tensors} tensors of {exported.numbers:,} numbers, '
        'read back and equal to those of the model; left out, since transformers computes them: '
        f'{", ".join(exported.left_out) or "none"}. Images of {size}x{size} pixels'
    )
    return 0


def _side(cfg: Config) -> int:
    (height, width), origin = default_window(cfg)
    if height != width:
        raise ConfigError(
            f'{origin} is {height}x{width}: EomtDinov3 of transformers takes squares. Give --size.'
        )
    return height
