"""How an error becomes one of all ranks, in one process; tests/distributed/ has the ranks."""

from __future__ import annotations

from typing import Dict

import pytest
from support import UNDECODABLE

from mapsage.distributed import SerialChannel, all_ranks_or_none, error_text, raise_together

FILE = UNDECODABLE + '.tif'


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError('no message today')


@pytest.mark.parametrize(
    'error, text',
    [
        (KeyError('scene'), "KeyError: 'scene'"),
        (OSError(), 'OSError: '),
        (ValueError('a\0b'), 'ValueError: a\0b'),
        (OSError(f'cannot read {FILE}'), r'OSError: cannot read \udcb5\udcd8.tif'),
        (Mute(), 'Mute without a readable message'),
    ],
)
def test_every_error_has_a_text(error: Exception, text: str) -> None:
    assert error_text(error) == text


@pytest.mark.parametrize('letter', ['a', '像', UNDECODABLE[0]])
def test_a_text_is_cut_by_bytes_between_characters(letter: str) -> None:
    text = error_text(ValueError(letter * 5000))
    assert 3990 < len(text.encode()) <= 4000
    assert (
        f'ValueError: {letter * 5000}'.encode('utf-8', 'backslashreplace').decode().startswith(text)
    )


def test_one_process_raises_its_own_exception() -> None:
    error = OSError(FILE)
    with pytest.raises(OSError) as raised, all_ranks_or_none():
        raise error
    assert raised.value is error and raised.value.__cause__ is None
    with pytest.raises(OSError) as raised:
        raise_together(SerialChannel(), error, 'reading')
    assert raised.value is error


def test_one_error_for_all_is_made_of_the_texts() -> None:
    def make(texts: Dict[int, str]) -> RuntimeError:
        return RuntimeError(f'failed: {texts}')

    error = KeyError('scene')
    with pytest.raises(RuntimeError, match=r"failed: \{3: 'because'\}") as raised:
        raise_together(SerialChannel(3), error, 'reading', text='because', everywhere=make)
    assert raised.value.__cause__ is error
    with pytest.raises(RuntimeError, match="failed: {3: 'given up'}"):
        raise_together(SerialChannel(3), None, 'reading', text='given up', everywhere=make)
