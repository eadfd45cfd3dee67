"""Records of MMRS-1M: answers, phrases, and boxes in pixels."""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mmrs1m_samples import readme_box

from mapsage.extras.mmrs1m.records import (
    Box,
    Conversation,
    find_class,
    object_name,
    read_class,
    read_objects,
    undo_padding,
)


@given(st.integers(8, 3000), st.integers(8, 3000), st.data())
def test_padding_is_undone(width: int, height: int, data: Any) -> None:
    x0, x1 = sorted(data.draw(st.tuples(*[st.integers(0, width)] * 2)))
    y0, y1 = sorted(data.draw(st.tuples(*[st.integers(0, height)] * 2)))
    stored = Box(*readme_box(x0, y0, x1 - x0, y1 - y0, width, height))
    np.testing.assert_allclose(undo_padding(stored, width, height, ''), (x0, y0, x1, y1), atol=1e-8)


@pytest.mark.parametrize(
    'size, edges',
    [
        ((200, 100), (0, 0.25, 1, 0.75)),
        ((100, 200), (0.25, 0, 0.75, 1)),
        ((101, 200), (49 / 200, 0, 150 / 200, 1)),
    ],
)
def test_the_whole_image_fills_its_part_of_the_square(
    size: Tuple[int, int], edges: Tuple[float, float, float, float]
) -> None:
    assert undo_padding(Box(*edges), *size, '') == (0, 0, *size)


def _answers(*turns: Tuple[str, str]) -> Conversation:
    return Conversation('a.png', turns)


def test_phrases_and_boxes_of_detection_and_grounding() -> None:
    objects = read_objects(
        _answers(
            (
                'Find ships.',
                'There are <p>2 ships</p>[0.1,0.2,0.3,0.4;0,0,1,1;] and <p>a tank</p>'
                '[0.5,0.5,0.6,0.6].',
            ),
            ('What is here: [0.2,0.1,0.4,0.3]', 'Bridge.'),
        ),
        'x',
    )
    assert objects == [
        ('2 ships', Box(0.1, 0.2, 0.3, 0.4)),
        ('2 ships', Box(0, 0, 1, 1)),
        ('a tank', Box(0.5, 0.5, 0.6, 0.6)),
        ('Bridge', Box(0.2, 0.1, 0.4, 0.3)),
    ]


@pytest.mark.parametrize(
    'box, words',
    [
        ('0.3,0,0.1,1', 'x0 <= x1'),
        ('0,0,1.2,1', 'x0 <= x1'),
        ('0,0,1', 'x0 <= x1'),
        ('0,0,1,0,1,1,0,1', 'oriented box'),
    ],
)
def test_malformed_boxes_are_refused(box: str, words: str) -> None:
    with pytest.raises(ValueError, match=f'record 7 has .*{words}'):
        read_objects(_answers(('Find ships.', f'<p>ship</p>[{box}]')), 'record 7')


def test_the_class_is_the_only_answer() -> None:
    assert read_class(_answers(('Which class?', ' harbor. ')), 'x') == 'harbor'
    for answers in ((('?', 'a'), ('?', 'b')), (('?', ''),), (('?', '<p>ship</p>'),)):
        with pytest.raises(ValueError, match='record 7 answers .*expected one class name'):
            read_class(_answers(*answers), 'record 7')


def test_names_are_found_without_count_case_or_plural() -> None:
    assert [object_name(phrase) for phrase in ('13 Ships', 'a Storage Tank', 'anchor')] == [
        'ships',
        'storage tank',
        'anchor',
    ]
    classes = ('Ship', 'storage tank')
    assert [find_class(name, classes) for name in ('ships', 'storage tank', 'shi', 'bus')] == [
        0,
        1,
        -1,
        -1,
    ]
