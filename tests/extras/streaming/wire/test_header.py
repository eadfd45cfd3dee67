"""A header says what was put into it, or says that it is damaged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mapsage.extras.streaming.wire.header import (
    _MAGIC,
    WORDS,
    Header,
    HeaderError,
    Kind,
    _crc,
    decode_header,
    encode_header,
)
from mapsage.extras.streaming.wire.payload import DTYPES, Layout

numbers = st.integers(0, 2**63 - 1)
dtypes = st.sampled_from(DTYPES)
shapes = st.lists(st.tuples(*[st.integers(0, 40)] * 4), min_size=1, max_size=8).map(tuple)
layouts = st.builds(Layout, shapes, dtypes, dtypes)


@st.composite
def headers(draw):
    header = Header(
        draw(st.sampled_from(Kind)),
        *[draw(numbers) for _ in range(12)],
        draw(st.none() | dtypes),
        draw(layouts),
    )
    size = header.layout.nbytes
    return (
        replace(header, total=size)
        if header.kind == Kind.OFFER
        else (replace(header, nbytes=size) if header.kind == Kind.REQUEST else header)
    )


@given(headers())
def test_what_is_encoded_is_decoded(header):
    words = encode_header(header)
    assert words.shape == (WORDS,) and words.dtype == torch.int64
    assert decode_header(words) == header


@given(headers(), st.integers(0, WORDS * 8 - 1), st.integers(0, 7))
def test_a_changed_bit_is_seen(header, byte, bit):
    words = encode_header(header)
    words.numpy().view('u1')[byte] ^= 1 << bit
    with pytest.raises(HeaderError):
        decode_header(words)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=WORDS, max_size=WORDS))
def test_what_is_no_header_is_refused(words):
    with pytest.raises(HeaderError):
        decode_header(torch.tensor(words))


@given(
    st.lists(
        st.sampled_from([0, 1, 2, 7, 8, -1, 2**63 - 1, -(2**63)])
        | st.integers(-(2**63), 2**63 - 1),
        min_size=WORDS - 2,
        max_size=WORDS - 2,
    )
)
def test_numbers_under_a_right_checksum_are_a_header_or_refused(numbers):
    """As a peer could send them who means no good, or runs another version."""
    words = [_MAGIC, *numbers]
    try:
        header = decode_header(torch.tensor([*words, _crc(words)]))
    except HeaderError:
        return
    assert 0 <= header.nbytes < 2**63
    assert header.layout is None or header.layout.nbytes >= 0


def test_an_offer_whose_layout_and_total_differ_is_refused():
    layout = Layout(((1, 2, 3, 4),), torch.float32, torch.float32)
    offer = Header(Kind.OFFER, total=96, layout=layout)
    assert decode_header(encode_header(offer)).layout == layout
    with pytest.raises(HeaderError, match='contradicts itself'):
        decode_header(encode_header(Header(Kind.OFFER, total=95, layout=layout)))
    with pytest.raises(HeaderError, match='contradicts itself'):
        decode_header(encode_header(Header(Kind.REQUEST, nbytes=96)))


@pytest.mark.parametrize(
    'header',
    [
        Header(Kind.DATA, item=-1),
        Header(Kind.DATA, offset=2**63),
        Header(Kind.OFFER, layout=Layout(((1, 2, 3),), torch.float32, torch.float32)),
        Header(Kind.OFFER, layout=Layout(((1, 2, 3, 4),) * 9, torch.float32, torch.float32)),
        Header(Kind.REQUEST, wire=torch.int64),
    ],
)
def test_what_cannot_travel_is_refused(header):
    with pytest.raises(ValueError, match='expected'):
        encode_header(header)
