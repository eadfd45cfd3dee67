"""Where an Enflame S60 would compute a training step of each shipped config: a Markdown table.

    python tools/benchmarks/config_operators.py [CONFIG ...] [--crop-size N]

The table of docs/how-to/gcu.md. It needs no card and no data: `mapsage operators CONFIG`
has the operators behind a row.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mapsage.commands import cli
from mapsage.commands.cli import read_config
from mapsage.engine.env_cfg import ConfigError
from mapsage.extras.forensics.operator_report import record_config
from mapsage.extras.forensics.operators.placement import S60Table
from mapsage.extras.forensics.operators.verdict import estimate_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('configs', nargs='*', help='default: all shipped configs')
    parser.add_argument('--crop-size', type=int, help="default: the config's")
    options = parser.parse_args()
    configs = options.configs or [
        str(path) for path in sorted((ROOT / 'configs').rglob('*.py')) if '_base_' not in path.parts
    ]
    print(
        '| config | crop | GFLOP | on the CPU: operators | calls | FLOPs | MB | a prediction | '
        'useful speed |'
    )
    print('|---|---|---|---|---|---|---|---|---|')
    for config in configs:
        args = cli.build_parser('', True).parse_args([config, '--accelerator', 'cpu'])
        try:
            training, forward, step = record_config(read_config(args), options.crop_size)
        except ConfigError as error:
            print(f'| {config} | {error} |')
            continue
        estimate, prediction = (
            estimate_step(recording, S60Table()) for recording in (training, forward)
        )
        operators = sum(row.placement.place.value == 'CPU' for row in estimate.rows)
        name = str(Path(config).resolve().relative_to(ROOT / 'configs'))
        print(
            f'| {name[:-3]} | {step.crop[0]} | {estimate.flops / 1e9:,.0f} | {operators} | '
            f'{estimate.cpu_calls} | {estimate.cpu_share:.1%} | {estimate.host_bytes / 1e6:,.0f} '
            f'| {prediction.cpu_calls} calls | {estimate.answer.split(":")[0]}, '
            f'{estimate.slowdown:.1f} x, {estimate.gain:.1f} x |',
            flush=True,
        )


if __name__ == '__main__':
    main()
