"""What the extra adds to tools/predict.py: masks of the confident pixels, and a config on them."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of pseudo-labels to a parser."""
    parser.add_argument(
        '--pseudo-labels',
        metavar='DIR',
        help='folder for masks of the confident pixels, 255 elsewhere, and a '
        'config that trains on them and the labeled data; the maps go '
        'into its folder maps without --out',
    )
    parser.add_argument(
        '--min-confidence',
        type=float,
        metavar='P',
        help='least confidence of a pixel in a mask (default: 0.9)',
    )
    parser.add_argument(
        '--min-share',
        type=float,
        metavar='SHARE',
        help="share of each class's pixels, the most confident ones, that is in "
        'the masks in any case, so that rare classes are not lost: the quantile of '
        'class-balanced self-training, Zou et al., ECCV 2018 (default: 0.2; 0: '
        '--min-confidence holds for all classes)',
    )


def is_asked(args: argparse.Namespace) -> bool:
    """Return whether a command line wants pseudo-labels."""
    return args.pseudo_labels is not None


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program with the parser's error if options contradict each other; set defaults."""
    if not is_asked(args):
        if args.min_confidence is not None or args.min_share is not None:
            parser.error('--min-confidence and --min-share shape masks: add --pseudo-labels')
        return
    args.out = args.out or str(Path(args.pseudo_labels) / 'maps')
    if args.model is not None:
        parser.error(
            '--pseudo-labels with --model: the masks join the labels of a config; give '
            'CONFIG and CHECKPOINT'
        )
    if args.mosaic is not None:
        parser.error(
            '--mosaic with --pseudo-labels: a mask has the grid of its scene, and a '
            'mosaic has the grid of none; leave --mosaic out'
        )
    args.min_confidence = 0.9 if args.min_confidence is None else args.min_confidence
    args.min_share = 0.2 if args.min_share is None else args.min_share
    for option, value in (
        ('--min-confidence', args.min_confidence),
        ('--min-share', args.min_share),
    ):
        if not 0 <= value <= 1:
            parser.error(f'{option} {value:g}: expected 0 to 1')


def run(args: argparse.Namespace) -> int:
    """Predict maps, write masks and a config, and return the exit status."""
    # Needs PyTorch, unlike a prediction with --model.
    from .pseudo_labels import predict_pseudo_labels

    return predict_pseudo_labels(args)
