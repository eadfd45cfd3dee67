"""Tables of classes: the change to the run before, and confusion matrices."""

from __future__ import annotations

import re
from typing import List

from mapsage.pictures.report.class_sections import _class_table, _counterpart, confusion_table
from mapsage.pictures.report.runs import ClassTable, Evaluation

SCORES = ClassTable('', ['land', 'r<d'], dict(IoU=[60.0, None], Acc=[90.0, 1.0]), [[3, 1], [0, 0]])


def cells(html: str) -> List[str]:
    """Return the texts of the cells of the body of a table, without marks."""
    body = html.split('<tbody>')[1]
    return [re.sub('<[^>]*>', '', cell) for cell in re.findall(r'<t[hd].*?</t[hd]>', body)]


def test_classes_are_compared_by_their_names() -> None:
    before = ClassTable('', ['road', 'land'], dict(IoU=[1.0, 50.0]))
    assert cells(_class_table(SCORES, before)) == [
        'land',
        '60.00',
        '+10.00',
        '90.00',
        '100.00 %',
        'r&lt;d',
        'undefined',
        '',
        '1.00',
        '0.00 %',
    ]
    # Another first metric cannot be compared.
    assert '+10.00' not in _class_table(SCORES, ClassTable('', ['land'], dict(Dice=[50.0])))


def test_a_table_is_compared_with_the_same_evaluator() -> None:
    first, second, named = (ClassTable(name, ['a'], {}) for name in ('', '', 'edge'))
    before = Evaluation('val', 10, {}, [first, named, second])
    assert _counterpart(named, 0, before) is named
    assert _counterpart(first, 0, before) is first and _counterpart(first, 5, before) is second
    assert _counterpart(ClassTable('other', ['a'], {}), 0, before) is None
    assert _counterpart(first, 0, None) is None


def test_rows_of_a_confusion_matrix_are_shares_of_the_truth() -> None:
    html = confusion_table(SCORES)
    assert cells(html) == ['land', '75.0', '25.0', 'r&lt;d', '', '']
    assert 'title="land as r&lt;d: 1 pixels"' in html and html.count('class="dark"') == 1
    # A class without pixels has no shares.
    assert html.count('class="none"') == 2


def test_many_classes_have_cells_without_text() -> None:
    names = [f'c{number}' for number in range(41)]
    matrix = [[int(row == column) for column in range(41)] for row in range(41)]
    html = confusion_table(ClassTable('', names, {}, matrix))
    assert 'confusion small' in html and 'title=' not in html and set(cells(html)) == {*names, ''}
