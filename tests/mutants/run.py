"""Plant small defects one at a time and show which test catches each.

    python tests/mutants/run.py [--only NAME ...] [--room ROOM] [--jobs N] [--table FILE]

The defects are listed in mutants.py. The working tree is copied into a temporary folder; there the
tests of all chosen defects first run without any defect, and then each defect is planted, its tests
run until the first one fails, and the defect is taken out again. The exit status is 0 when every
defect was caught, 1 when one survived, and 2 when nothing can be said: a defect does not fit the
source any more, or a test fails without any defect.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
# A test that meets a defect may wait for a rank that never comes: longer than the tests' own
# deadlines, on a busy machine.
_TIMEOUT_SECONDS = 600
_BASELINE_SECONDS = 1800
_MARK = 'MAPSAGE_MUTANT_RUN'  # in the environment of all that a test run starts
_FAILED = re.compile(r'^(?:FAILED|ERROR) (.+?)(?: - .*)?$', re.MULTILINE)


class MutantError(Exception):
    """Nothing can be said about a defect; the message names what is in the way."""


class Outcome(NamedTuple):
    """How the tests of a defect ended.

    Attributes:
        caught_by: The first failing test, or 'timeout'; None when all tests passed.
        seconds: Duration of the test run.
        output: Output of pytest.
    """

    caught_by: Optional[str]
    seconds: float
    output: str


class Copy:
    """A copy of the working tree in which one defect at a time is planted.

    Args:
        folder: Where the copy is made, with the temporary files of its tests.
    """

    # Python takes a compiled file for up to date when the source's whole second and size are the
    # same: so every write of this process has a second of its own.
    _seconds = itertools.count(int(time.time()) - 10**7)

    def __init__(self, folder: Path) -> None:
        self.tree, self._temporary = folder / 'tree', folder / 'tmp'
        # A test has another user, who has to find the files of this tree.
        folder.parent.chmod(0o755)
        self._process: Optional[subprocess.Popen] = None
        listed = subprocess.run(
            ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'],
            cwd=str(ROOT),
            check=True,
            stdout=subprocess.PIPE,
        ).stdout.decode()
        for name in filter(None, listed.split('\0')):
            if (ROOT / name).is_file():  # git also lists what was deleted since
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(str(ROOT / name), str(self.tree / name))

    def run_mutated(self, mutant: Mutant) -> Outcome:
        """Run the tests of a defect while it is planted."""
        path = self.tree / mutant.file
        whole = path.read_text()
        self._write(path, planted(mutant, whole))
        try:
            return self.run_tests(mutant.tests, ['-x'], _TIMEOUT_SECONDS)
        finally:
            self._write(path, whole)

    def run_tests(self, tests: Sequence[str], options: Sequence[str], timeout: float) -> Outcome:
        """Run tests of this copy, and end all that they started.

        Raises:
            MutantError: If pytest could not run them.
        """
        shutil.rmtree(str(self._temporary), ignore_errors=True)
        self._temporary.mkdir()
        mark = f'{os.getpid()}-{next(self._seconds)}'
        environ = dict(os.environ, TMPDIR=str(self._temporary), OMP_NUM_THREADS='1')
        environ[_MARK] = mark
        command = [
            sys.executable,
            '-m',
            'pytest',
            *tests,
            *options,
            '-q',
            # what each day's run would see
            *('-m', 'not long'),
            '--tb=short',
            '-p',
            'no:cacheprovider',
            f'--basetemp={self._temporary / "pytest"}',
        ]
        begin = time.monotonic()
        with open(str(self._temporary / 'output'), 'w+', errors='replace') as output:
            self._process = subprocess.Popen(
                command,
                cwd=str(self.tree),
                env=environ,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                status: Optional[int] = self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(self._process, mark)
            seconds = time.monotonic() - begin
            output.seek(0)
            text = output.read()
        if status is None:
            return Outcome('timeout', seconds, text)
        failed = _FAILED.search(text)
        if status == 0:
            return Outcome(None, seconds, text)
        # 2: a test file could not be imported; 3 and more, or a signal: pytest itself failed
        if status not in (1, 2) or failed is None:
            raise MutantError(f'pytest ended with status {status}:\n{text[-3000:]}')
        return Outcome(failed.group(1), seconds, text)

    def stop(self) -> None:
        """End the test run that is under way in another thread."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        second = next(self._seconds)
        os.utime(str(path), (second, second))


def planted(mutant: Mutant, source: str) -> str:
    """Return a source text with a defect in it.

    Raises:
        MutantError: If the text that the defect replaces does not occur exactly once.
    """
    found = source.count(mutant.old)
    if found != 1 or mutant.old == mutant.new:
        raise MutantError(
            f'{mutant.name}: its old text occurs {found} times in {mutant.file}, '
            f'expected once, and a new text that differs. Bring mutants.py up to '
            f'date with the source.'
        )
    return source.replace(mutant.old, mutant.new)


def _end(process: subprocess.Popen, mark: str) -> None:
    """Kill a test run with its process group and what it started in groups of their own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    wanted = f'{_MARK}={mark}'.encode()
    for path in Path('/proc').glob('[0-9]*/environ'):
        try:
            if wanted in path.read_bytes().split(b'\0'):
                os.kill(int(path.parent.name), signal.SIGKILL)
        except OSError:  # it has ended, or is another user's
            continue


def choose(only: Sequence[str], room: Optional[str]) -> List[Mutant]:
    """Return the defects of these names and of this room, all without either.

    Raises:
        MutantError: If there is none, a name is unknown, or one is used twice.
    """
    names = [mutant.name for mutant in MUTANTS]
    wrong = {name for name in names if names.count(name) > 1} | (set(only) - set(names))
    chosen = [
        mutant
        for mutant in MUTANTS
        if (not only or mutant.name in only)
        and (room is None or f'{mutant.room}/'.startswith(f'{room.rstrip("/")}/'))
    ]
    if wrong or not chosen:
        raise MutantError(
            f'defects {sorted(wrong) or "chosen: none"}; expected names that occur '
            f'once among {", ".join(names)}, of a room among '
            f'{", ".join(sorted({mutant.room for mutant in MUTANTS}))}.'
        )
    return chosen


def run_all(chosen: Sequence[Mutant], jobs: int, folder: Path) -> Dict[str, Outcome]:
    """Run the tests without any defect, then :func:`try_all`.

    Raises:
        MutantError: If a test fails without any defect, or a defect cannot be tried.
    """
    for mutant in chosen:  # said before the tests take their minutes
        planted(mutant, (ROOT / mutant.file).read_text())
    tests = sorted({test for mutant in chosen for test in mutant.tests})
    print(f'{len(tests)} test files and tests without any defect ...', flush=True)
    baseline = Copy(folder / 'baseline').run_tests(tests, [], _BASELINE_SECONDS)
    if baseline.caught_by is not None:
        raise MutantError(
            f'without any defect fails {baseline.caught_by}:\n{baseline.output[-3000:]}'
        )
    print(f'all pass, {baseline.seconds:.0f} s', flush=True)
    return try_all(chosen, jobs, folder)


def try_all(chosen: Sequence[Mutant], jobs: int, folder: Path) -> Dict[str, Outcome]:
    """Return the outcome of each defect by its name; prints a line for each as it ends.

    Raises:
        MutantError: If a defect cannot be tried.
    """
    every = [Copy(folder / str(number)) for number in range(jobs)]
    copies: queue.Queue = queue.Queue()
    for copy in every:
        copies.put(copy)
    print('\nroom | defect | file | caught by | seconds', flush=True)

    def try_out(mutant: Mutant) -> Outcome:
        copy = copies.get()
        try:
            outcome = copy.run_mutated(mutant)
        except MutantError as error:
            raise MutantError(f'{mutant.name}: {error}') from error
        finally:
            copies.put(copy)
        print(
            f'{mutant.room} | {mutant.name}: {mutant.what} | {mutant.file} | '
            f'{outcome.caught_by or "NOTHING"} | {outcome.seconds:.0f}',
            flush=True,
        )
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        try:
            outcomes = list(pool.map(try_out, chosen))
        except BaseException:  # Ctrl-C too: no test run outlives this one
            for copy in every:
                copy.stop()
            raise
    return {mutant.name: outcome for mutant, outcome in zip(chosen, outcomes)}


def table(chosen: Sequence[Mutant], outcomes: Dict[str, Outcome]) -> str:
    """Return the outcomes as a Markdown table, in the order of the list."""
    lines = ['| room | defect | caught by |', '| --- | --- | --- |']
    for mutant in chosen:
        test = outcomes[mutant.name].caught_by
        # without the parameters of a test, which may hold a bar
        caught_by = f'`{test.split("[")[0]}`' if test else '**nothing**'
        lines.append(f'| {mutant.room} | {mutant.what} | {caught_by} |')
    return '\n'.join(lines) + '\n'


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--only', nargs='+', default=[], metavar='NAME', help='defects by name')
    parser.add_argument('--room', help='defects in a folder of mapsage, or in tools')
    parser.add_argument('--jobs', type=int, default=1, help='defects tried at the same time')
    parser.add_argument('--table', type=Path, help='Markdown file to write')
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    begin = time.monotonic()
    try:
        chosen = choose(args.only, args.room)
        with tempfile.TemporaryDirectory(prefix='mapsage-mutants-') as folder:
            outcomes = run_all(chosen, max(1, args.jobs), Path(folder))
    except MutantError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    if args.table is not None:
        args.table.write_text(table(chosen, outcomes))
    survivors = [mutant for mutant in chosen if outcomes[mutant.name].caught_by is None]
    print(
        f'\n{len(chosen) - len(survivors)} of {len(chosen)} defects were caught, in '
        f'{time.monotonic() - begin:.0f} s'
    )
    for mutant in survivors:
        print(f'NOT CAUGHT: {mutant.name} in {mutant.file}: {mutant.what}')
    return 1 if survivors else 0


if __name__ == '__main__':
    sys.exit(main())
