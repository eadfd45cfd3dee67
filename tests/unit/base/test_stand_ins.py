"""An object that stands for another, and functions that are replaced for a while."""

from __future__ import annotations

import copy
import math
import pickle

import pytest

from mapsage.base.stand_ins import Delegate, replaced


class Loud(Delegate):
    """A text with another ``upper``."""

    def upper(self) -> str:
        return self.original.upper() + '!'


def test_a_stand_in_has_what_its_original_has_and_it_lacks() -> None:
    text = Loud('word')
    assert (text.upper(), text.title()) == ('WORD!', 'Word')
    with pytest.raises(AttributeError, match='shout'):
        text.shout()


@pytest.mark.parametrize(
    'copied', [copy.copy, copy.deepcopy, lambda text: pickle.loads(pickle.dumps(text))]
)
def test_a_stand_in_can_be_copied(copied) -> None:  # type: ignore[no-untyped-def]
    text = copied(Loud('word'))
    assert type(text) is Loud
    assert text.upper() == 'WORD!'


def test_functions_are_restored_after_an_error() -> None:
    original = math.sqrt
    with pytest.raises(ZeroDivisionError):
        with replaced(math, sqrt=lambda number: 7.0, no_such_function=len):
            assert math.sqrt(2) == 7.0
            assert not hasattr(math, 'no_such_function')
            raise ZeroDivisionError
    assert math.sqrt is original
    assert not hasattr(math, 'no_such_function')
