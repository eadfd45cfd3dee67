"""Write a trained model as one ONNX file for QGIS, Enflame's runtimes, or anything that reads ONNX.

    python tools/export.py CONFIG CHECKPOINT --out model.onnx [--target qgis|gcu|onnx]
    python tools/export.py CONFIG CHECKPOINT --card DIR    # with README, scores, weights, preview

The file is compared with the model on tiles of the validation set, and not written if it differs.
"""

from __future__ import annotations

from typing import Optional, Sequence

from mapsage.commands import options


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = options.build_parser('Write a trained model as one ONNX file.', doc=__doc__)
    parser.add_argument('checkpoint', help='path of the checkpoint')
    destination = parser.add_mutually_exclusive_group(required=True)
    destination.add_argument('--out', metavar='MODEL.onnx', help='name of the file')
    destination.add_argument(
        '--card',
        metavar='DIR',
        help='folder of a model card: model.onnx, README.md with the scores of a '
        'validation, model.safetensors, config.py, preview.png',
    )
    parser.add_argument(
        '--target',
        choices=['qgis', 'gcu', 'onnx'],
        help="reader of the file: QGIS' Deepness plugin, Enflame's runtimes, or "
        'others, as new as possible (default: qgis; onnx for models of several '
        'dates)',
    )
    parser.add_argument(
        '--window',
        type=int,
        metavar='PIXELS',
        help="side of the image (default: the config's training size, else 512)",
    )
    parser.add_argument(
        '--batch',
        type=int,
        metavar='N',
        help='number of images in a batch (default: any; for gcu 1)',
    )
    parser.add_argument(
        '--opset',
        type=int,
        metavar='N',
        help='version of the operators (default: 17, for gcu 13, for onnx 20)',
    )
    parser.add_argument(
        '--gsd',
        type=float,
        metavar='METERS',
        help='side of a pixel of the training, for QGIS (default: the pixel side '
        "of the val set's first image, if it is georeferenced)",
    )
    parser.add_argument(
        '--tiles',
        type=int,
        default=16,
        metavar='N',
        help='number of tiles that the file is compared on (default: 16)',
    )
    parser.add_argument(
        '--int8',
        action='store_true',
        help='8-bit integers, calibrated on as many other tiles; mIoU is printed '
        "next to float32's, and a file that loses more than a point is not "
        'written',
    )
    parser.add_argument('--overwrite', action='store_true', help='replace files that exist')
    args = parser.parse_args(argv)
    if args.tiles < 1:
        parser.error(f'--tiles {args.tiles}: expected 1 or more')
    if args.gsd is not None and not 0 < args.gsd < float('inf'):
        parser.error(f'--gsd {args.gsd:g}: expected a number of meters above 0')
    from mapsage.extras.export.command import export_model

    return export_model(args)


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
