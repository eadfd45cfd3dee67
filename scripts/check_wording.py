#!/usr/bin/env python
"""Check how names and texts of each room read: vague names, dialect.

Rooms are the folders of mapsage/, the launcher, and what is not the product: tests/, tools/, scripts/,
configs/, examples/ and the pages of docs/.

    python scripts/check_wording.py               # what run_tests.sh runs; status 1 above a budget
    python scripts/check_wording.py --show geo    # where one room's words and names are
    python scripts/check_wording.py --lower       # write today's figures into the budgets

A vague name says nothing about its content (`each`, `found`, `mine`). Dialect is a phrase that a
stranger has to read twice ("that of", "is none" for invalid, "alone" for only). CONTRIBUTING.md has
pairs of sentences, before and after. `wording_budget.json` holds what each room may have, and a
budget never rises. The figures serve the reader: a synonym that dodges this list helps nobody.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import Dict, List, NamedTuple, Tuple

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = Path(__file__).with_name('wording_budget.json')
# The package of the launcher counts as one room.
LAUNCHER = 'mapsage_launcher'
# What is not the product: a room each. Pages have no names.
OTHERS = ('configs', 'docs', 'examples', 'scripts', 'tests', 'tools')
# Blocks of code, and code in a line.
_CODE = re.compile(r'^```.*?^```|`[^`\n]*`', re.DOTALL | re.MULTILINE)
# What a room may have without an entry: names per 1,000, phrases per 10,000 words.
LIMIT = 8.0

VAGUE_NAMES = frozenset(
    'about after asked before each every found given held here kept made mine other others own '
    'part parts place places theirs there told turn turns wanted what whose why words'.split()
)
DIALECT = re.compile(
    r'\b(?:(?:that|those) of|is none|if it has none|alone|besides?|go(?:es)? on|in turns?|whoever'
    r'|whose one|anew|of (?:its|their) own|as told|what is told)\b',
    re.IGNORECASE,
)


class Figures(NamedTuple):
    """How a room reads.

    Attributes:
        vague: Vague names per 1,000 names.
        dialect: Phrases of dialect per 10,000 words of docstrings and comments.
    """

    vague: float
    dialect: float


class Wording:
    """Counts over the files of a room."""

    def __init__(self) -> None:
        self.names = self.words = 0
        self.vague: Counter = Counter()
        self.phrases: List[str] = []

    def add(self, source: str, path: str) -> None:
        """Count a file.

        Args:
            source: Text of the file.
            path: Name of the file for the list of phrases.
        """
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
                self._add_text(ast.get_docstring(node) or '', path, getattr(node, 'lineno', 1))
            elif isinstance(node, (ast.Name, ast.arg)):
                name = (node.id if isinstance(node, ast.Name) else node.arg).strip('_')
                self.names += 1
                if name in VAGUE_NAMES:
                    self.vague[name] += 1
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                self._add_text(token.string, path, token.start[0])

    def add_page(self, text: str, path: str) -> None:
        """Count a page of Markdown, without its code.

        Args:
            text: The page.
            path: Name of the file for the list of phrases.
        """
        for number, line in enumerate(_CODE.sub(_blank, text).splitlines(), 1):
            self._add_text(line, path, number)

    def _add_text(self, text: str, path: str, line: int) -> None:
        self.words += len(text.split())
        for match in DIALECT.finditer(text):
            around = ' '.join(text[max(0, match.start() - 50) : match.end() + 40].split())
            self.phrases.append(f'{path}:{line}: ...{around}...')

    def figures(self) -> Figures:
        """Return the counts in relation to the size of the room."""
        return Figures(
            round(1e3 * sum(self.vague.values()) / max(1, self.names), 1),
            round(1e4 * len(self.phrases) / max(1, self.words), 1),
        )


def _blank(match: re.Match) -> str:
    """Return the line ends of a match."""
    return '\n' * match[0].count('\n')


def read_other_rooms() -> Dict[str, Wording]:
    """Return the counts of the folders that are not the product."""
    rooms: Dict[str, Wording] = {}
    for name in OTHERS:
        room = rooms[name] = Wording()
        for path in sorted((ROOT / name).rglob('*.py')):
            room.add(path.read_text(encoding='utf-8'), str(path.relative_to(ROOT)))
        for path in sorted((ROOT / name).rglob('*.md')):
            room.add_page(path.read_text(encoding='utf-8'), str(path.relative_to(ROOT)))
    return rooms


def read_rooms(package: Path) -> Dict[str, Wording]:
    """Return the counts of each folder of a package; those of its own files are at ``'(root)'``."""
    rooms: Dict[str, Wording] = {}
    for path in sorted(package.rglob('*.py')):
        relative = path.relative_to(package)
        room = relative.parts[0] if len(relative.parts) > 1 else '(root)'
        rooms.setdefault(room, Wording()).add(path.read_text(encoding='utf-8'), str(relative))
    return rooms


def read_budgets() -> Dict[str, Figures]:
    """Return the budget of each room that may have more than ``LIMIT``."""
    return {
        room: Figures(**figures)
        for room, figures in json.loads(BUDGETS.read_text(encoding='utf-8')).items()
    }


def compare(rooms: Dict[str, Figures], budgets: Dict[str, Figures]) -> List[Tuple[str, str]]:
    """Return the rooms that are above their budget, each with a sentence."""
    above = []
    for room, figures in sorted(rooms.items()):
        budget = budgets.get(room, Figures(LIMIT, LIMIT))
        for kind, figure, most in zip(Figures._fields, figures, budget):
            if figure > most:
                above.append((room, f'{kind} {figure:g}, expected at most {most:g}'))
    return above


def lower(rooms: Dict[str, Figures], budgets: Dict[str, Figures]) -> Dict[str, Figures]:
    """Return budgets that hold today's figures where these are lower; never below ``LIMIT``."""
    lowered = {}
    for room, budget in budgets.items():
        figures = rooms.get(room, Figures(0, 0))
        figures = Figures(*(max(LIMIT, min(figure, most)) for figure, most in zip(figures, budget)))
        if figures != Figures(LIMIT, LIMIT):
            lowered[room] = figures
    return lowered


def main() -> int:
    """Check, show or lower; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--show', metavar='ROOM', help='print the phrases and names of one room')
    parser.add_argument('--lower', action='store_true', help='lower the budgets to the figures')
    args = parser.parse_args()
    rooms = read_rooms(ROOT / 'mapsage')
    launcher = Wording()
    for path in sorted((ROOT / LAUNCHER).rglob('*.py')):
        launcher.add(path.read_text(encoding='utf-8'), str(path.relative_to(ROOT)))
    rooms[LAUNCHER] = launcher
    rooms.update(read_other_rooms())
    if args.show:
        if args.show not in rooms:
            parser.error(f'--show {args.show}: expected one of {", ".join(rooms)}')
        room = rooms[args.show]
        print('\n'.join(room.phrases))
        print(', '.join(f'{name} {number}' for name, number in room.vague.most_common()))
        return 0
    figures = {name: room.figures() for name, room in rooms.items()}
    if args.lower:
        budgets = lower(figures, read_budgets())
        BUDGETS.write_text(
            json.dumps(
                {room: budget._asdict() for room, budget in sorted(budgets.items())}, indent=1
            )
            + '\n',
            encoding='utf-8',
        )
        return 0
    above = compare(figures, read_budgets())
    for name, sentence in above:
        print(
            f'wording of {name}: {sentence}. '
            f'`python scripts/check_wording.py --show {name}` lists them.'
        )
    print(
        f'wording: {len(figures) - len({name for name, _ in above})} of {len(figures)} rooms '
        f'within their budget'
    )
    return 1 if above else 0


if __name__ == '__main__':
    sys.exit(main())
