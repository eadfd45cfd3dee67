"""Draw charts of a training's dynamic sampling over its iterations, and examples of samples.

python tools/plot_sampling.py WORK_DIR [--out PATH]
"""

from __future__ import annotations

import argparse
import sys
from typing import Optional, Sequence

from mapsage.base.console import accept_any_text


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    accept_any_text()
    parser = argparse.ArgumentParser(description='Draw what dynamic sampling did in a training.')
    parser.add_argument('work_dir', help='work dir of a training with DynamicSamplingHook')
    parser.add_argument('--out', help='PNG file to write (default: WORK_DIR/dynamic_sampling.png)')
    args = parser.parse_args(argv)
    from mapsage.pictures.sampling_plot import SamplingPlotError, plot_sampling

    try:
        print(plot_sampling(args.work_dir, args.out))
    except (OSError, SamplingPlotError) as error:
        print(f'{type(error).__name__}: {error}', file=sys.stderr)
        return 1
    return 0


def run() -> None:
    """Run the command line and exit."""
    sys.exit(main())
