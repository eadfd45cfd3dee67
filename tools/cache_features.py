"""Compute the frozen encoder's features of all training samples: one device, or one rank of many.

    python tools/cache_features.py CONFIG [--views K] [--batch-size N] [--folder DIR]
    bash scripts/cache_features.sh CONFIG [options]                   all cards of this machine

A run that was stopped continues with the same arguments. Training reads the cache with
feature_source = dict(type='Cached', folder=DIR, views=K) in its config (docs/feature-sources.md).
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mapsage.commands import cache_features, cli  # noqa: E402


def main(argv=None) -> int:
    parser = cli.build_parser("Compute the frozen encoder's features of all training samples.")
    parser.add_argument('--views', type=int, metavar='K',
                        help='fixed views a sample, for a pipeline with random augmentation '
                        "(default: the config's feature_source.views; without it such a pipeline "
                        'is refused)')
    parser.add_argument('--batch-size', type=int, default=1, metavar='N',
                        help='images at a time; above 1 the last bit of features may differ from '
                        'those of other batches (default: 1)')
    parser.add_argument('--folder', metavar='DIR',
                        help="where the cache is (default: the config's feature_source.folder, "
                        'else WORK_DIR/features)')
    args = parser.parse_args(argv)
    for name in ('views', 'batch_size'):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: expected 1 or more")
    return cache_features.cache_features(args)


if __name__ == '__main__':
    cli.run(main)
