"""Run MMEngine's own tests with MapSageRunner in Runner's place.

    git clone --branch v0.10.7 https://github.com/open-mmlab/mmengine /tmp/mmengine
    python tests/conformance/host_tests.py /tmp/mmengine [arguments of pytest]

These are its tests of Runner, loops, hooks, optimizers, schedules, logging and distributed
functions. Each test file runs twice, in processes of its own: with MMEngine as it is installed, and
with MapSage imported and ``Runner`` replaced, also in the two ranks that a test starts. The program
prints what passes with Runner and not with MapSageRunner. Each such test must stand in
docs/reference/conformance.md with its reason; the exit status is 1 if one does not, or if a test
that stands there passes.

The tests need the package ``parameterized`` (``pip install --target FOLDER parameterized``, with
FOLDER in PYTHONPATH, leaves the environment alone). The version of the checkout should be that of
the installed MMEngine or, where a fork is installed, the one that the fork began with.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Dict, List

ROOT = Path(__file__).resolve().parents[2]
DIFFERENCES = ROOT / 'docs' / 'reference' / 'conformance.md'
FOLDERS = ('test_logging', 'test_hooks', 'test_runner', 'test_optim', 'test_dist')
ENDS_WELL = ['-p', 'ranks_that_end_well']
IN_RUNNERS_PLACE = ['-p', 'in_runners_place']
SECONDS_A_FILE = 1800

PASSED, FAILED, SKIPPED = 'passed', 'failed', 'skipped'


def main() -> int:
    """Run the tests both ways, print the differences and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('checkout', type=Path, help="folder of a checkout of MMEngine's repository")
    parser.add_argument('--only', help='part of the name of the test files to run')
    arguments, pytest_arguments = parser.parse_known_args()
    stock: Dict[str, str] = {}
    ours: Dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        # A copy, because the checkout's own mmengine must not take the installed one's place.
        tests = Path(folder) / 'tests'
        shutil.copytree(arguments.checkout / 'tests', tests)
        for file in [
            path.relative_to(tests)
            for name in FOLDERS
            for path in sorted((tests / name).rglob('test_*.py'))
        ]:
            if arguments.only and arguments.only not in str(file):
                continue
            one = run_file(tests, file, pytest_arguments)
            other = run_file(tests, file, [*IN_RUNNERS_PLACE, *pytest_arguments])
            print(
                f'{file}: {count(one)} with Runner, {count(other)} with MapSageRunner', flush=True
            )
            stock.update(one)
            ours.update(other)
    return report(stock, ours, documented(DIFFERENCES.read_text()))


def run_file(tests: Path, file: Path, arguments: List[str]) -> Dict[str, str]:
    """Run a test file in a separate process and return the outcome of each test."""
    results = tests / 'results.xml'
    paths = [str(ROOT), str(ROOT / 'tests' / 'conformance'), os.environ.get('PYTHONPATH', '')]
    if arguments[:2] == IN_RUNNERS_PLACE:  # for the ranks, which know nothing of pytest's plugins
        start = tests / 'start'
        start.mkdir(exist_ok=True)
        (start / 'sitecustomize.py').write_text(
            'import sys\nif "--multiprocessing-fork" in sys.argv: import in_runners_place\n'
        )
        paths.insert(0, str(start))
    environ = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join(filter(None, paths)),
        # The tests read their checkpoints with a plain torch.load.
        TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD='1',
    )
    command = [
        sys.executable,
        '-m',
        'pytest',
        '-q',
        '-p',
        'no:cacheprovider',
        f'--junitxml={results}',
        str(file),
        *ENDS_WELL,
        *arguments,
    ]
    finished = subprocess.run(
        command,
        cwd=str(tests),
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=SECONDS_A_FILE,
        universal_newlines=True,
        errors='replace',
    )
    if finished.returncode not in (0, 1):
        raise SystemExit(
            f'{" ".join(command)} ended with status {finished.returncode}:\n'
            + finished.stdout[-4000:]
        )
    return outcomes(results, len(file.parts))


def outcomes(results: Path, depth: int) -> Dict[str, str]:
    """Read the outcome of each test, as ``file::test`` or ``file::class::test``.

    Args:
        results: File of pytest's results.
        depth: Number of the folders of the test file, and one for itself.
    """
    found = {}
    for case in ElementTree.parse(str(results)).iter('testcase'):
        kinds = {child.tag for child in case}
        outcome = (
            FAILED if kinds & {'failure', 'error'} else SKIPPED if 'skipped' in kinds else PASSED
        )
        parts = case.get('classname', '').split('.')[depth - 1 :]
        found['::'.join([*parts, case.get('name', '')])] = outcome
    return found


def count(found: Dict[str, str]) -> str:
    """Say how many tests passed and how many did not."""
    passed = sum(outcome == PASSED for outcome in found.values())
    return f'{passed} of {len(found)} pass'


def documented(text: str) -> List[str]:
    """Return the tests of MMEngine that docs/reference/conformance.md lists as different."""
    return re.findall(r'^\| `(test_\w+::[^`]+)`', text, flags=re.MULTILINE)


def report(stock: Dict[str, str], ours: Dict[str, str], known: List[str]) -> int:
    """Print what differs and return the exit status."""
    passed = [test for test, outcome in stock.items() if outcome == PASSED]
    different = [test for test in passed if ours.get(test) != PASSED]
    unknown = [test for test in different if test not in known]
    mended = [test for test in known if test in passed and test not in different]
    print(
        f'{len(stock)} tests: {len(passed)} pass with Runner, '
        f'{len(passed) - len(different)} of these with MapSageRunner'
    )
    print(
        'neither passes nor is compared: '
        + (
            ', '.join(
                sorted(
                    f'{test} ({outcome})' for test, outcome in stock.items() if outcome != PASSED
                )
            )
            or 'none'
        )
    )
    for title, tests in (
        ('differs, as docs/reference/conformance.md says', set(different) - set(unknown)),
        ('DIFFERS, and docs/reference/conformance.md does not say why', unknown),
        ('PASSES, remove it from docs/reference/conformance.md', mended),
    ):
        for test in sorted(tests):
            print(f'{title}: {test}')
    return 1 if unknown or mended else 0


if __name__ == '__main__':
    sys.exit(main())
