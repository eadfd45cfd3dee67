"""Write a trained EoMT as a folder that Hugging Face's transformers reads.

    python tools/export_eomt.py CONFIG CHECKPOINT OUT [--size 512]

OUT gets model.safetensors, config.json and preprocessor_config.json, for
``EomtDinov3ForUniversalSegmentation.from_pretrained(OUT)`` and ``EomtImageProcessor``.
"""

from __future__ import annotations

from typing import Optional, Sequence

from mapsage.commands import options


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
    args = parser.parse_args(argv)
    from mapsage.commands.export_eomt import export_eomt

    return export_eomt(args)


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
