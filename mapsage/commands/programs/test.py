"""Evaluate a checkpoint: on one device, or as one rank of a launcher.

python tools/test.py CONFIG CHECKPOINT [--tta] [--calibration] [--out DIR] [--show-dir DIR]
    [--show]
bash scripts/test.sh CONFIG CHECKPOINT [options of this program]
"""

from __future__ import annotations

from typing import Optional, Sequence

from mapsage.commands import options


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run the program with a command line (default: ``sys.argv``)."""
    parser = options.build_parser('Evaluate a segmentation model.', doc=__doc__)
    parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument('--out', help='write the predicted masks into this folder')
    parser.add_argument('--show-dir', help='write pictures of the predictions into this folder')
    parser.add_argument('--show', action='store_true', help='show the predictions in a window')
    parser.add_argument(
        '--wait-time',
        type=float,
        default=2,
        metavar='S',
        help='seconds for which --show shows a prediction (default: 2)',
    )
    parser.add_argument(
        '--tta',
        action='store_true',
        help="test-time augmentation: the config's tta_pipeline, or else every "
        'image with its two mirror images',
    )
    parser.add_argument(
        '--calibration',
        action='store_true',
        help='also compare probabilities with shares of correct pixels: ECE, a '
        'table by class, and reliability.png in the work dir',
    )
    args = parser.parse_args(argv)
    from mapsage.commands import cli, mirrored_test

    cfg = cli.load_config(args)
    cfg.work_dir = args.work_dir or cli.test_folder(cfg, args.checkpoint)
    cfg.load_from = args.checkpoint
    cfg.resume = False
    # Only trainings use it.
    cfg.pop('feature_source', None)
    if args.out:
        cli.write_masks_to(cfg, args.out)
    if args.calibration:
        cli.test_calibration(cfg)
    if args.show_dir or args.show:
        cli.draw_predictions(cfg, args.show_dir, args.show, args.wait_time)
    if args.tta:
        mirrored_test.use_tta(cfg)
    cli.build_runner(cfg).test()


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
