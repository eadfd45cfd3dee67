"""Names of classes of change."""

from __future__ import annotations

import pytest

from mapsage.geo.change_classes import (
    ChangeClassError,
    from_to_classes,
    reversed_classes,
    transition_of,
    transition_palette,
)


def test_all_pairs_of_different_classes_are_from_to_classes() -> None:
    assert from_to_classes(['field', 'wood']) == ('unchanged', 'field > wood', 'wood > field')
    assert from_to_classes(['field', 'wood'], ['wood > field']) == ('unchanged', 'wood > field')
    assert transition_of('wood > field') == ('wood', 'field') and transition_of('changed') is None


def test_a_from_to_class_has_mostly_the_color_of_its_new_class() -> None:
    names = from_to_classes(['field', 'wood'])
    assert transition_palette(names, ['field', 'wood'], [[100, 0, 0], [0, 200, 0]]) == [
        [255, 255, 255],
        [30, 140, 0],
        [70, 60, 0],
    ]


@pytest.mark.parametrize(
    'land, transitions, text',
    [
        (['field'], None, 'two or more'),
        (['a', 'a'], None, 'two or more'),
        (['a > b', 'c'], None, 'two or more'),
        (['unchanged', 'c'], None, 'two or more'),
        (['a', 'b'], ['a > c'], r"unknown: \['a > c'\]"),
        (['a', 'b'], [], 'transitions'),
        ([str(number) for number in range(17)], None, '272 from-to classes'),
    ],
)
def test_classes_that_contradict_each_other(land: list, transitions: list, text: str) -> None:
    with pytest.raises(ChangeClassError, match=text):
        from_to_classes(land, transitions)


def test_exchanged_dates_reverse_from_to_classes() -> None:
    assert reversed_classes(('unchanged', 'changed')) == [0, 1]
    assert reversed_classes(from_to_classes(['a', 'b'])) == [0, 2, 1]


@pytest.mark.parametrize('names', [('unchanged', 'new building'), ('unchanged', 'a > b')])
def test_a_class_without_reverse_is_refused(names: tuple) -> None:
    with pytest.raises(ChangeClassError, match='dates are exchanged'):
        reversed_classes(names)
    if ' > ' not in names[1]:
        assert reversed_classes(names, symmetric=names) == [0, 1]
