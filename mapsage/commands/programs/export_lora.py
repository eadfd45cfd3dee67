"""Take LoRA adapters out of a checkpoint: merged into the weights, or as files of peft.

    python tools/export_lora.py CONFIG CHECKPOINT --merged OUT.pth
    python tools/export_lora.py CONFIG CHECKPOINT --peft FOLDER [--names huggingface]

OUT.pth is a complete checkpoint without adapters, so it runs as fast as a model without LoRA. Its
config is written next to it, as OUT.py.
"""

from __future__ import annotations

from typing import Optional, Sequence

from mapsage.commands import options


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
    from mapsage.commands.export_lora import export_lora

    return export_lora(args)


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
