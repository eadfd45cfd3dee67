"""Draw what dynamic sampling did during a training: charts over iterations, and samples.

    python tools/plot_sampling.py WORK_DIR [--out PATH]
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mapsage.console import accept_any_text  # noqa: E402
from mapsage.drawing.sampling_plot import SamplingPlotError, plot_sampling  # noqa: E402


def main(argv=None) -> int:
    accept_any_text()
    parser = argparse.ArgumentParser(description='Draw what dynamic sampling did in a training.')
    parser.add_argument('work_dir', help='work dir of a training with DynamicSamplingHook')
    parser.add_argument('--out', help='PNG file to write (default: '
                        'WORK_DIR/dynamic_sampling.png)')
    args = parser.parse_args(argv)
    try:
        print(plot_sampling(args.work_dir, args.out))
    except (OSError, SamplingPlotError) as error:
        print(f'{type(error).__name__}: {error}', file=sys.stderr)
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
