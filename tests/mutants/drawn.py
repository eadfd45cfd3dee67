"""Draw defects from the syntax trees of the core, and run the tests that cover the line of each.

    python tests/mutants/drawn.py [--count N] [--seed N] [--room ROOM ...] [--tests PATH ...] [--jobs N]

A defect is a comparison that is turned, a constant that is moved, a branch that is dropped, or two
arguments that are swapped; as many of one kind as of another. Which ones are drawn depends on the seed
and on the line that holds them, not on the rest of the core, so that two commits are compared on the
same defects. The lines that a test covers, in all processes that it starts, are recorded once for a
state of the code, and kept in the user's cache. A defect in a line that no test covers survives.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Sequence, Set, Tuple

from mutants import Mutant
from run import ROOT, Copy, MutantError, try_all

PACKAGES = ('mapsage', 'mapsage_launcher')
# What belongs to extras, and what only users of old import paths meet.
_OUTSIDE = ('mapsage/extras/', 'mapsage_launcher/nodes/', 'mapsage/compat_paths.py')
# Tests of the main leg, as scripts/run_tests.sh runs them.
_NOT_MAIN = ('long', 'cluster', 'browser', 'trl', 'engines')
_COVERAGE_SECONDS = 3 * 3600
_TURNED = {
    ast.Lt: ('<', '<='),
    ast.LtE: ('<=', '<'),
    ast.Gt: ('>', '>='),
    ast.GtE: ('>=', '>'),
    ast.Eq: ('==', '!='),
    ast.NotEq: ('!=', '=='),
    ast.Is: ('is', 'is not'),
    ast.IsNot: (r'is\s+not', 'is'),
    ast.In: ('in', 'not in'),
    ast.NotIn: (r'not\s+in', 'in'),
}
# Functions that raise at once where their arguments are swapped.
_TYPED = ('isinstance', 'issubclass', 'getattr', 'hasattr', 'setattr')
# Defects that no test can see, by their keys, each with the reason.
EQUIVALENT: Dict[str, str] = {
    'e89a1aac55': 'the two ends of a section of an outline go through min and max',
    '46ffe6c355': 'the arguments of max',
    '25c957cb5e': 'a share above 1 is refused by the sum of the shares too',
    'ab9d0ebfe2': 'the sampler sets the seconds of each step that it returns',
}


class Defect(NamedTuple):
    """A place of the core and what stands there instead.

    Attributes:
        key: Name that depends on file, function, line and kind alone.
        file: Path of the source, from the root of the repository.
        line: Number of the line in which the place begins, from 1.
        what: Kind, old and new text.
        source: Whole source with the defect.
        in_function: Whether it is executed by calls, and not by an import.
    """

    key: str
    file: str
    line: int
    what: str
    source: str
    in_function: bool


class Places(ast.NodeVisitor):
    """Collects the places of a module at which a defect can be planted."""

    def __init__(self, text: str) -> None:
        self.lines = text.encode().splitlines(keepends=True)
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line))
        self._text = text.encode()
        self._function: List[str] = []
        # (kind, function, line, start, end, new text), in bytes
        self.places: List[Tuple[str, str, int, int, int, str]] = []

    def _span(self, node: ast.AST) -> Tuple[int, int]:
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _add(self, kind: str, node: ast.AST, start: int, end: int, new: str) -> None:
        place = (kind, '.'.join(self._function), node.lineno, start, end, new)
        self.places.append(place)

    def generic_visit(self, node: ast.AST) -> None:
        for name, value in ast.iter_fields(node):
            # Annotations compute nothing; the words of an error are another matter.
            if name in ('annotation', 'returns', 'decorator_list'):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, (ast.Raise, ast.JoinedStr)):
                    self.visit(child)

    def _visit_scope(self, node: ast.AST) -> None:
        self._function.append(node.name)
        self.generic_visit(node)
        self._function.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit_scope

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            old, new = _TURNED[type(node.ops[0])]
            start, end = self._span(node.left)[1], self._span(node.comparators[0])[0]
            between = self._text[start:end].decode()
            self._add('comparison', node, start, end, re.sub(old, f' {new} ', between, count=1))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self._add('constant', node, *self._span(node), str(node.value + 1))
        elif type(node.value) is float:
            self._add('constant', node, *self._span(node), repr(node.value * 2 or 1.0))

    def visit_If(self, node: ast.If) -> None:
        if not node.orelse and ast.unparse(node.test) != 'TYPE_CHECKING':
            self._add('branch', node, *self._span(node.test), 'False')
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ''
        if (
            name not in _TYPED
            and len(node.args) > 1
            and not any(isinstance(arg, ast.Starred) for arg in node.args[:2])
        ):
            (start, middle), (other, end) = map(self._span, node.args[:2])
            first, second = self._text[start:middle], self._text[other:end]
            if first != second:
                new = second + self._text[middle:other] + first
                self._add('arguments', node, start, end, new.decode())
        self.generic_visit(node)


def defects_of(file: str) -> Iterator[Tuple[str, Defect]]:
    """Yield the kind and the defect of every place of a source."""
    text = (ROOT / file).read_text()
    places = Places(text)
    places.visit(ast.parse(text))
    whole, seen = text.encode(), Counter()
    for kind, function, line, start, end, new in places.places:
        # The line itself, so that code before it does not matter; equal ones are counted.
        name = '|'.join((file, function, kind, places.lines[line - 1].decode().strip(), new))
        seen[name] += 1
        key = hashlib.sha256(f'{name}|{seen[name]}'.encode()).hexdigest()[:10]
        old = ' '.join(whole[start:end].decode().split())
        source = (whole[:start] + new.encode() + whole[end:]).decode()
        what = f'{kind}: {old or "()"} -> {" ".join(new.split())}'
        yield kind, Defect(key, file, line, what, source, bool(function))


def draw(count: int, seed: int, rooms: Sequence[str]) -> List[Defect]:
    """Return defects of the core, the same number of each kind, without the equivalent ones.

    Raises:
        MutantError: If the core has not so many.
    """
    by_kind: Dict[str, List[Defect]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob('*.py')):
            file = path.relative_to(ROOT).as_posix()
            if file.startswith(_OUTSIDE) or not file.startswith(tuple(rooms) or PACKAGES):
                continue
            for kind, defect in defects_of(file):
                if defect.key not in EQUIVALENT:
                    by_kind[kind].append(defect)
    drawn = []
    for number, kind in enumerate(sorted(by_kind)):
        order = sorted(
            by_kind[kind],
            key=lambda defect: hashlib.sha256(f'{seed}|{defect.key}'.encode()).digest(),
        )
        drawn += order[: count // len(by_kind) + (number < count % len(by_kind))]
    if len(drawn) < count:
        raise MutantError(f'{len(drawn)} of {count} defects; draw fewer, or in more rooms.')
    return drawn


def record_lines(paths: Sequence[str], jobs: int, folder: Path) -> Path:
    """Run tests in a copy, and return the folder of what covered_lines.py has recorded."""
    digest = hashlib.sha256(' '.join(paths).encode())
    for top in (*PACKAGES, 'tests', 'tools', 'scripts', 'configs'):
        for path in sorted((ROOT / top).rglob('*')):
            if path.suffix in ('.py', '.sh', '.json', '.tsv'):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    cache = Path(os.environ.get('XDG_CACHE_HOME', Path.home() / '.cache')) / 'mapsage'
    lines = cache / 'covered_lines' / digest.hexdigest()[:16]
    if lines.exists():
        return lines
    copy = Copy(folder / 'coverage')
    shutil.copy(Path(__file__).with_name('covered_lines.py'), copy.tree / 'tests/sitecustomize.py')
    partial = Path(tempfile.mkdtemp(prefix='covered-', dir=_made(lines.parent)))
    os.environ.update(
        MAPSAGE_COVERED_LINES=str(partial),
        MAPSAGE_CORE=os.pathsep.join(f'{copy.tree / package}/' for package in PACKAGES),
        PYTHONPATH=str(copy.tree / 'tests'),
    )
    try:
        workers = ['-n', str(jobs), '--dist', 'loadfile'] if jobs > 1 else []
        outcome = copy.run_tests(
            paths, [*workers, '-rfE', '-p', 'sitecustomize'], _COVERAGE_SECONDS
        )
    finally:
        for name in ('MAPSAGE_COVERED_LINES', 'MAPSAGE_CORE', 'PYTHONPATH'):
            del os.environ[name]
    (partial / 'pytest').write_text(outcome.output)
    (partial / 'tree').write_text(str(copy.tree))
    partial.rename(lines)
    return lines


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def covering_tests(defects: Sequence[Defect], lines: Path) -> Dict[str, List[str]]:
    """Return the tests that execute the line of a defect, by its key, those of its room first.

    A line that a fixture executes belongs to all tests of the file. A line that is executed while a
    process imports the module belongs to all tests that execute one of the module.
    """
    tree = (lines / 'tree').read_text()
    tests: Dict[Tuple[str, int], Set[str]] = defaultdict(set)
    of_file: Dict[str, Set[str]] = defaultdict(set)
    wanted = {(defect.file, defect.line) for defect in defects}
    files = {file for file, _ in wanted}
    for path in lines.glob('*-*'):
        test = file = ''
        for line in path.read_text(errors='replace').splitlines():
            if line[:1] == 'T':
                name, _, phase = line[1:].rpartition(' ')
                test = name.split('[')[0] if phase == '(call)' else name.split('::')[0]
            elif line[:1] == 'F':
                file = os.path.relpath(line[1:], tree)
            elif file in files:
                of_file[file].add(test)
                if (file, int(line)) in wanted:
                    tests[file, int(line)].add(test)
    failed = set(re.findall(r'^(?:FAILED|ERROR) ([^\s\[]+)', (lines / 'pytest').read_text(), re.M))
    chosen = {}
    for defect in defects:
        covering = tests[defect.file, defect.line]
        if not defect.in_function or covering == {''}:
            covering = of_file[defect.file]
        covering = {
            test
            for test in covering - failed - {''}
            if '::' not in test or test.split('::')[0] not in covering
        }
        stem = Path(defect.file).stem.strip('_')
        room = defect.file.split('/')[1]
        chosen[defect.key] = sorted(
            covering,
            key=lambda test: (f'test_{stem}' not in test, f'/{room}/' not in test, test),
        )
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--count', type=int, default=60, help='number of defects')
    parser.add_argument('--seed', type=int, default=46)
    parser.add_argument('--room', nargs='+', default=[], help='folders, such as mapsage/sampling')
    parser.add_argument('--tests', nargs='+', help='tests that may catch them (default: main leg)')
    parser.add_argument('--jobs', type=int, default=1, help='defects tried at the same time')
    parser.add_argument('--list', action='store_true', help='print the defects, and run nothing')
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    begin = time.monotonic()
    try:
        defects = draw(args.count, args.seed, args.room)
        if args.list:
            for defect in defects:
                print(f'{defect.key} {defect.file}:{defect.line} {defect.what}')
            return 0
        paths = args.tests or [f'--ignore=tests/{name}' for name in (*_NOT_MAIN, 'mutants')]
        with tempfile.TemporaryDirectory(prefix='mapsage-mutants-') as folder:
            lines = record_lines(paths, args.jobs, Path(folder))
            print(f'lines of the tests: {lines}, {time.monotonic() - begin:.0f} s', flush=True)
            tests = covering_tests(defects, lines)
            mutants = [
                Mutant(
                    defect.key,
                    defect.file,
                    f'line {defect.line}, {defect.what}',
                    (ROOT / defect.file).read_text(),
                    defect.source,
                    tuple(tests[defect.key]),
                )
                for defect in defects
            ]
            covered = [mutant for mutant in mutants if mutant.tests]
            outcomes = try_all(covered, args.jobs, Path(folder))
    except MutantError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    # Where tests hang, or there was no time for all of them, no test has failed.
    survivors = [
        mutant
        for mutant in mutants
        if not mutant.tests or outcomes[mutant.name].caught_by in (None, 'timeout')
    ]
    print(
        f'\n{len(mutants) - len(survivors)} of {len(mutants)} defects were caught, '
        f'{len(mutants) - len(covered)} are in lines that no test covers, '
        f'in {time.monotonic() - begin:.0f} s'
    )
    for mutant in survivors:
        print(f'NOT CAUGHT: {mutant.name} in {mutant.file}, {mutant.what}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
