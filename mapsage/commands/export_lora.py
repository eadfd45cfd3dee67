"""Take LoRA adapters out of a checkpoint: merged into the weights, or as files of peft.

    python tools/export_lora.py CONFIG CHECKPOINT --merged OUT.pth
    python tools/export_lora.py CONFIG CHECKPOINT --peft FOLDER [--names huggingface]

OUT.pth is a complete checkpoint without adapters, so it runs as fast as a model without LoRA. Its
config is written next to it, as OUT.py: it needs no pretrained weights, and trains and predicts
like any other.
"""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Optional, Sequence

from mapsage.commands import options

if TYPE_CHECKING:
    import torch
    from mmengine.config import Config


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = options.build_parser('Take LoRA adapters out of a checkpoint.')
    parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument(
        '--merged',
        metavar='OUT.pth',
        help='checkpoint with the adapters merged '
        'into the weights; its config is written next to it',
    )
    parser.add_argument(
        '--peft',
        metavar='FOLDER',
        help='folder for adapter_config.json and adapter_model.safetensors',
    )
    parser.add_argument(
        '--names',
        choices=['own', 'huggingface', 'huggingface4'],
        default='own',
        help="names of the layers in peft's file: MapSage's own, or the names in "
        'DINOv3ViTModel of transformers 5 or 4 (default: own)',
    )
    args = parser.parse_args(argv)
    if not (args.merged or args.peft):
        parser.error('nothing to write: give --merged OUT.pth, --peft FOLDER, or both')
    return export_lora(args)


def export_lora(args: argparse.Namespace) -> int:
    """Write the merged checkpoint, the files for peft, or both.

    Args:
        args: ``config``, ``checkpoint``, ``merged`` (path of a checkpoint, or None), ``peft``
            (folder, or None), ``names``, and the arguments of
            :func:`mapsage.commands.cli.load_config`.

    Returns:
        0, the exit status.

    Raises:
        ConfigError: If the config's model has no adapters, or a file exists already.
        PredictError: If the checkpoint does not fit the model, or its weights cannot be restored.
    """
    from mapsage.commands import cli
    from mapsage.commands.cli import build_model
    from mapsage.engine.env_cfg import ConfigError
    from mapsage.host.segmentors import child_module
    from mapsage.maps.model import load_weights
    from mapsage.models.lora import describe_lora, merge_lora
    from mapsage.models.lora.adapted import Adapted
    from mapsage.models.lora.peft_format import write_peft

    for path in (args.merged, args.merged and _merged_config(args.merged), args.peft):
        if path and os.path.exists(path):
            raise ConfigError(f'{path} exists already: remove it, or give another name.')
    cfg = cli.load_config(args)
    model: Any = build_model(cfg)
    backbone = child_module(model, 'backbone')
    if backbone is None or not any(isinstance(module, Adapted) for module in backbone.modules()):
        raise ConfigError(
            f'the model of {args.config} has no LoRA adapters: expected '
            f'model.backbone.lora=dict(rank=..., targets=...). Give the config that '
            f'the checkpoint was trained with.'
        )
    meta = load_weights(model, args.checkpoint)
    print(f'{args.checkpoint}: {describe_lora(backbone)}')
    if args.peft:
        count = write_peft(backbone, Path(args.peft), args.names)
        print(f'{args.peft}: adapters of {count} layers in the format of peft')
    if args.merged:
        merge_lora(model)
        _write_merged(args.merged, model, meta, _without_lora(cfg))
        print(
            f'{args.merged}: the whole model, adapters merged; its config: '
            f'{_merged_config(args.merged)}'
        )
    return 0


def _write_merged(path: str, model: torch.nn.Module, meta: Dict[str, Any], cfg: Config) -> None:
    from mapsage.engine.checkpoints.files import write_checkpoint

    copied_meta: Dict[str, Any] = {
        key: meta[key] for key in ('dataset_meta', 'epoch', 'iter', 'seed') if key in meta
    }
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    write_checkpoint(
        dict(meta=dict(copied_meta, cfg=cfg.pretty_text), state_dict=model.state_dict()), path
    )
    cfg.dump(_merged_config(path))


def _merged_config(path: str) -> str:
    """Return the path of the config of a merged checkpoint."""
    return str(Path(path).with_suffix('.py'))


def _without_lora(cfg: Config) -> Config:
    """Return the config of the merged model, which needs no pretrained weights."""
    plain = copy.deepcopy(cfg)
    backbone = plain.model.backbone
    for key in ('lora', 'init_cfg', 'pretrained'):
        backbone.pop(key, None)
    # The backbone that LoRA wraps replaces the wrapper.
    if 'of' in backbone:
        backbone.type = backbone.pop('of')
    hooks = [
        hook for hook in plain.get('custom_hooks') or [] if hook.get('type') != 'TrainedWeightsHook'
    ]
    plain.pop('custom_hooks', None)
    if hooks:
        plain.custom_hooks = hooks
    plain.pop('launcher', None)
    return plain


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
