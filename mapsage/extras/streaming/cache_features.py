"""Compute the frozen encoder's features of all training samples: one device, or one rank of many.

    python tools/cache_features.py CONFIG [--views K] [--batch-size N] [--folder DIR]
    bash scripts/cache_features.sh CONFIG [options]                   all cards of this machine

Repeat the command with the same arguments to continue a run that was stopped. A training reads the
cache if its config has feature_source = dict(type='Cached', folder=DIR, views=K)
(docs/how-to/feature-sources.md).
"""

from __future__ import annotations

import functools
from typing import Optional, Sequence

from mapsage.commands import options


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = options.build_parser("Compute the frozen encoder's features of all training samples.")
    parser.add_argument(
        '--views',
        type=int,
        metavar='K',
        help='number of fixed views per sample, for a pipeline with random '
        "augmentation (default: the config's feature_source.views; without either, "
        'such a pipeline is refused)',
    )
    parser.add_argument(
        '--batch-size',
        type=int,
        default=1,
        metavar='N',
        help='number of images encoded at a time; above 1 the last bit of features '
        'may depend on the batch (default: 1)',
    )
    parser.add_argument(
        '--folder',
        metavar='DIR',
        help="folder of the cache (default: the config's feature_source.folder, "
        'else WORK_DIR/features)',
    )
    args = parser.parse_args(argv)
    for option, number in (('--views', args.views), ('--batch-size', args.batch_size)):
        if number is not None and number < 1:
            parser.error(f'{option} {number}: expected 1 or more')
    from mapsage.extras.streaming.feature_caching import FeatureCaching

    return FeatureCaching(args, functools.partial(print, flush=True)).run()


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
