"""Train every config that MMSegmentation ships, shrunk, under both Runners, and compare the runs.

    python tests/conformance/sweep_configs.py RESULTS.jsonl [part of a name ...]

Each config runs in a separate process, and its result is a line of the file. The same command
continues where a file ends. What is not equal must stand in docs/reference/conformance.md with its
reason; the exit status is 1 if something does not, or if something that stands there is equal.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List

ROOT = Path(__file__).resolve().parents[2]
SECONDS_A_CONFIG = 600


def main() -> int:
    """Run the configs that have no result yet, print a summary and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('results', type=Path, help='file of the results, which may exist')
    parser.add_argument('parts', nargs='*', help='parts of the names of the configs to run')
    arguments = parser.parse_args()
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]
    import mapsage  # noqa: F401  (before mmseg, whose heads need mmcv's ops to be imported)
    import quick_host  # noqa: F401  isort: skip
    from shipped_configs import listed_reasons, reason_of, shipped_configs, write_shipped_images

    names = [
        name
        for name in shipped_configs()
        if not arguments.parts or any(part in name for part in arguments.parts)
    ]
    # The first config of every family, then the second of each: an early end leaves none out.
    turns = Counter()  # type: Counter[str]
    order = []
    for name in names:
        family = name.split('/')[0]
        turns[family] += 1
        order.append((turns[family], name))
    results = read_results(arguments.results)
    with tempfile.TemporaryDirectory() as folder:
        data = write_shipped_images(Path(folder) / 'data')
        for _, name in sorted(order):
            if name in results:
                continue
            results[name] = run_alone(name, data, Path(folder) / 'runs')
            with arguments.results.open('a') as file:
                file.write(json.dumps(results[name]) + '\n')
            print(
                f'{name}: {results[name]["outcome"]} {results[name]["detail"][:200]} '
                f'({results[name]["seconds"]:.0f} s)',
                flush=True,
            )
    return report([results[name] for name in names], reason_of, listed_reasons())


def read_results(path: Path) -> Dict[str, Dict[str, Any]]:
    """Return the results of a file by the names of the configs."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {result['config']: result for result in map(json.loads, lines)}


def run_alone(name: str, data: Path, folder: Path) -> Dict[str, Any]:
    """Compare the runs of a config in a fork of this process, and return its result."""
    began = time.monotonic()
    context = multiprocessing.get_context('fork')
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_compare, args=(name, data, folder, there))
    process.start()
    there.close()
    try:
        outcome, detail = (
            here.recv()
            if here.poll(SECONDS_A_CONFIG)
            else ('differs', f'no end after {SECONDS_A_CONFIG} s')
        )
    except EOFError:
        process.join()
        outcome, detail = 'differs', f'the process ended with status {process.exitcode}'
    process.kill()
    process.join()
    return dict(config=name, outcome=outcome, detail=detail, seconds=time.monotonic() - began)


def _compare(name: str, data: Path, folder: Path, pipe: Any) -> None:
    from shipped_configs import compare_shipped

    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        compared = compare_shipped(name, data, folder)
    except Exception as error:  # of a config that cannot be shrunk, in the report of the sweep
        pipe.send(('differs', f'{type(error).__name__}: {error}'))
        raise
    pipe.send((compared.outcome, compared.detail))


def report(results: List[Dict[str, Any]], reason_of: Any, listed: Dict[str, str]) -> int:
    """Print how many configs are equal, and what is listed wrongly; return the exit status."""
    count = Counter(result['outcome'] for result in results)
    families = {result['config'].split('/')[0] for result in results}
    equal = {result['config'].split('/')[0] for result in results if result['outcome'] == 'equal'}
    print(
        f'{len(results)} configs of {len(families)} families: {count["equal"]} of {len(equal)} '
        f'families are equal, {count["differs"]} differ, {count["not trained"]} end with the '
        f'same error under both'
    )
    print('families without an equal config:', ', '.join(sorted(families - equal)) or 'none')
    unknown = [
        result
        for result in results
        if result['outcome'] != 'equal' and reason_of(result['config']) is None
    ]
    mended = [
        result
        for result in results
        if result['outcome'] == 'equal' and reason_of(result['config']) is not None
    ]
    for title, wrong in (
        ('docs/reference/conformance.md does not say why', unknown),
        ('EQUAL, remove it from docs/reference/conformance.md', mended),
    ):
        for result in wrong:
            print(f'{title}: {result["config"]}: {result["outcome"]} {result["detail"][:300]}')
    print(f'{len(listed)} reasons listed')
    return 1 if unknown or mended else 0


if __name__ == '__main__':
    sys.exit(main())
