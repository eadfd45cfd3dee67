"""The S60's table: its size, its groups, and mistakes in such a file."""

from __future__ import annotations

from collections import Counter

import pytest

from mapsage.extras.forensics.operators.tables import parse_groups, s60_groups


def test_the_table_of_the_s60_is_whole() -> None:
    assert Counter(s60_groups().values()) == {
        'card': 696,
        'listed': 31,
        'listed-partly': 3,
        'no-kernel': 614,
    }
    assert s60_groups()['convolution_backward'] == 'listed'
    assert s60_groups()['native_batch_norm_backward'] == 'no-kernel'
    assert s60_groups()['native_batch_norm'] == 'card'


@pytest.mark.parametrize(
    'text, words',
    [
        ('[cards]\nmm', 'cards'),
        ('mm', "'mm' must be in one group"),
        ('[card]\nmm\n[listed]\nmm', "'mm' must be in one group, got 'card' and 'listed'"),
    ],
)
def test_a_mistake_in_a_table_is_named(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_groups(text)
