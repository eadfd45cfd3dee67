"""Write a trained EoMT as a folder that Hugging Face's transformers reads.

    python tools/export_eomt.py CONFIG CHECKPOINT OUT [--size 512]

OUT gets model.safetensors, config.json and preprocessor_config.json, for
``EomtDinov3ForUniversalSegmentation.from_pretrained(OUT)`` and ``EomtImageProcessor``. The folder
is written by `mapsage/extras/mask_transformers/huggingface_folder.py`; this module checks that
transformers can represent the model at all: three bands in RGB order, square images.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Sequence

from mapsage.commands import options

if TYPE_CHECKING:
    from mmengine.config import Config


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = options.build_parser('Write a trained EoMT as a folder that transformers reads.')
    parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument('out', metavar='OUT', help='folder to create')
    parser.add_argument(
        '--size',
        type=int,
        metavar='PIXELS',
        help="side of the images, which transformers fixes (default: the config's training size)",
    )
    return export_eomt(parser.parse_args(argv))


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
    from mapsage.commands import cli
    from mapsage.commands.cli import build_model
    from mapsage.engine.env_cfg import ConfigError
    from mapsage.extras.mask_transformers import EoMT
    from mapsage.extras.mask_transformers.huggingface_folder import write_huggingface
    from mapsage.maps.model import find_bands, find_classes, load_weights
    from mapsage.models.backbones.dinov3_weights import WeightsError
    from mapsage.models.lora import merge_lora
    from mapsage.models.lora.adapted import Adapted

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
    print(
        f'{args.out}: {exported.tensors} tensors of {exported.numbers:,} numbers, '
        'read back and equal to those of the model; left out, since transformers computes them: '
        f'{", ".join(exported.left_out) or "none"}. Images of {size}x{size} pixels'
    )
    return 0


def _side(cfg: Config) -> int:
    from mapsage.engine.env_cfg import ConfigError
    from mapsage.maps.model import default_window

    (height, width), origin = default_window(cfg)
    if height != width:
        raise ConfigError(
            f'{origin} is {height}x{width}: EomtDinov3 of transformers takes squares. Give --size.'
        )
    return height


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
