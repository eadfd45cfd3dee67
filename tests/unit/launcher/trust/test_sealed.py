"""Bytes with a seal are those that a holder of the secret sealed for the same purpose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapsage_launcher.trust.sealed import BrokenSealError, seal, unseal

SECRET = b's' * 32


@given(st.binary(max_size=200))
def test_sealed_bytes_come_back(data: bytes) -> None:
    assert unseal(seal(data, SECRET, 'samples'), SECRET, 'samples') == data


@given(st.binary(max_size=200))
def test_bytes_without_a_seal_are_refused(data: bytes) -> None:
    with pytest.raises(BrokenSealError, match=f'{len(data)} bytes of samples'):
        unseal(data, SECRET, 'samples')


@given(st.binary(max_size=64), st.data())
def test_changed_bytes_are_refused(data: bytes, draw: st.DataObject) -> None:
    sealed = bytearray(seal(data, SECRET, 'samples'))
    sealed[draw.draw(st.integers(0, len(sealed) - 1))] ^= draw.draw(st.integers(1, 255))
    with pytest.raises(BrokenSealError):
        unseal(bytes(sealed), SECRET, 'samples')


def test_a_seal_holds_for_one_secret_and_one_purpose() -> None:
    sealed = seal(b'data', SECRET, 'samples')
    for secret, purpose in ((b't' * 32, 'samples'), (SECRET, 'sample'), (SECRET, 'samples\0')):
        with pytest.raises(BrokenSealError):
            unseal(sealed, secret, purpose)
