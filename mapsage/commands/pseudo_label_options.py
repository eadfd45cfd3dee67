"""Options of tools/predict.py --pseudo-labels, without what only its work needs."""
from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of pseudo-labels."""
    parser.add_argument('--pseudo-labels', metavar='DIR',
                        help='folder for masks of what the model is sure of, 255 elsewhere, and a '
                        'config that trains on them and the labeled data')
    parser.add_argument('--min-confidence', type=float, metavar='P',
                        help='confidence from which on a pixel is kept in a mask (default: 0.9)')
    parser.add_argument('--min-share', type=float, metavar='SHARE',
                        help="share of each class's pixels, the most confident ones, that is kept "
                        'in any case, so that rare classes are not lost: the quantile of '
                        'class-balanced self-training, Zou et al., ECCV 2018 (default: 0.2; 0: '
                        '--min-confidence holds for all classes)')


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check the options of pseudo-labels, and set their defaults."""
    if args.pseudo_labels is None:
        if not args.out:
            parser.error('--out is missing: the folder of the maps')
        if args.min_confidence is not None or args.min_share is not None:
            parser.error('--min-confidence and --min-share shape masks: add --pseudo-labels')
        return
    if args.model is not None:
        parser.error('--pseudo-labels with --model: the masks join the labels of a config; give '
                     'CONFIG and CHECKPOINT')
    if args.mosaic is not None:
        parser.error('--mosaic with --pseudo-labels: a mask lies on the grid of its scene, and a '
                     'mosaic is on that of none; leave --mosaic out')
    args.min_confidence = 0.9 if args.min_confidence is None else args.min_confidence
    args.min_share = 0.2 if args.min_share is None else args.min_share
    for name in ('min_confidence', 'min_share'):
        if not 0 <= getattr(args, name) <= 1:
            parser.error(f'--{name.replace("_", "-")} {getattr(args, name):g}: expected 0 to 1')
