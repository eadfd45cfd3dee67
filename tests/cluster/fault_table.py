"""Play faults of elastic jobs on machines in network namespaces, and print the table of what came.

    OMP_NUM_THREADS=1 python tests/cluster/fault_table.py [--jobs 2] [NAME ...]

Needs root, iproute2, nftables and faketime. docs/how-to/clusters.md has the table.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import fault_scenarios  # noqa: E402, F401  (registers them)
from faults import SCENARIOS, play_all  # noqa: E402
from machines import why_not  # noqa: E402
from warm_python import warm_python  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('names', nargs='*', metavar='NAME', help=', '.join(SCENARIOS))
    parser.add_argument('--jobs', type=int, default=2, help='how many at a time')
    args = parser.parse_args()
    if why_not('nft', 'faketime'):
        sys.exit(f'error: {why_not("nft", "faketime")}')
    names = args.names or list(SCENARIOS)
    warm_python()
    with tempfile.TemporaryDirectory(prefix='mapsage-faults-') as folder:
        outcomes = play_all(names, Path(folder), args.jobs)
    print(
        '| fault | what happened | noticed, s | next step, s | steps lost |\n|---|---|---|---|---|'
    )
    for name in names:
        if isinstance(outcomes[name], Exception):
            print(f'| {SCENARIOS[name].fault} | **WRONG**: {name}, see below | | | |')
        else:
            print(outcomes[name].row(SCENARIOS[name].fault))
    wrong = {name: each for name, each in outcomes.items() if isinstance(each, Exception)}
    for name, error in wrong.items():
        print(f'\n=== {name}: {type(error).__name__}\n{error}')
    sys.exit(bool(wrong))


if __name__ == '__main__':
    main()
