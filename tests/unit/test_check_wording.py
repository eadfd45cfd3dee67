"""The check of names and texts counts what it says, and no budget of it rises."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Dict

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / 'scripts'))
from check_wording import Figures, Wording, compare, lower, read_rooms  # noqa: E402

SOURCE = '''"""Return that of a batch."""
for each in samples:
    found = each  # it goes on alone
'''


def test_names_and_phrases_are_counted() -> None:
    wording = Wording()
    wording.add(SOURCE, 'a.py')
    # each, samples, found, each: three of four names are vague
    assert dict(wording.vague) == {'each': 2, 'found': 1} and wording.names == 4
    # 5 words of the docstring, 5 of the comment with its sign
    assert wording.words == 10 and wording.figures() == Figures(750.0, 3000.0)
    assert [phrase.split(' ')[0] for phrase in wording.phrases] == ['a.py:1:', 'a.py:3:', 'a.py:3:']


def test_a_room_of_the_package_is_a_folder(tmp_path: Path) -> None:
    for name, text in {'a.py': SOURCE, 'geo/b.py': SOURCE, 'geo/deep/c.py': 'x = 1\n'}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    rooms = read_rooms(tmp_path)
    assert {name: room.names for name, room in rooms.items()} == {'(root)': 4, 'geo': 5}


@pytest.mark.parametrize(
    'figures, above', [(Figures(8.0, 8.0), 0), (Figures(8.1, 8.0), 1), (Figures(9.0, 9.0), 2)]
)
def test_a_new_room_may_have_little(figures: Figures, above: int) -> None:
    assert len(compare({'new': figures}, {})) == above


def test_a_budget_falls_and_never_rises() -> None:
    budgets = {'geo': Figures(40.0, 30.0), 'maps': Figures(9.0, 8.0), 'gone': Figures(20.0, 20.0)}
    rooms: Dict[str, Figures] = {'geo': Figures(20.0, 35.0), 'maps': Figures(2.0, 0.0)}
    assert lower(rooms, budgets) == {'geo': Figures(20.0, 30.0)}
    assert compare(rooms, budgets) == [('geo', 'dialect 35, expected at most 30')]
