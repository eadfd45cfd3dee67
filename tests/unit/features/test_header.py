"""A header says what was put into it, or says that it is damaged."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mapsage.features.wire.header import (
    WORDS,
    Header,
    HeaderError,
    Kind,
    decode_header,
    encode_header,
)
from mapsage.features.wire.payload import (
    DTYPES,
    Layout,
    checksum,
    item_size,
    pack_images,
    pack_levels,
    split,
)

CPU = torch.device('cpu')
numbers = st.integers(0, 2**63 - 1)
dtypes = st.sampled_from(DTYPES)
shapes = st.lists(st.tuples(*[st.integers(0, 40)] * 4), min_size=1, max_size=8).map(tuple)
layouts = st.builds(Layout, shapes, dtypes, dtypes)


@st.composite
def headers(draw):
    header = Header(draw(st.sampled_from(Kind)), *[draw(numbers) for _ in range(12)],
                    draw(st.none() | dtypes), draw(layouts))
    size = header.layout.nbytes
    return replace(header, total=size) if header.kind == Kind.OFFER else (
        replace(header, nbytes=size) if header.kind == Kind.REQUEST else header)


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


@given(st.lists(st.integers(-2**63, 2**63 - 1), min_size=WORDS, max_size=WORDS))
def test_what_is_no_header_is_refused(words):
    with pytest.raises(HeaderError):
        decode_header(torch.tensor(words))


def test_an_offer_whose_layout_and_total_differ_is_refused():
    layout = Layout(((1, 2, 3, 4),), torch.float32, torch.float32)
    offer = Header(Kind.OFFER, total=96, layout=layout)
    assert decode_header(encode_header(offer)).layout == layout
    with pytest.raises(HeaderError, match='contradicts itself'):
        decode_header(encode_header(Header(Kind.OFFER, total=95, layout=layout)))
    with pytest.raises(HeaderError, match='contradicts itself'):
        decode_header(encode_header(Header(Kind.REQUEST, nbytes=96)))


@pytest.mark.parametrize('header', [
    Header(Kind.DATA, item=-1), Header(Kind.DATA, offset=2**63),
    Header(Kind.OFFER, layout=Layout(((1, 2, 3),), torch.float32, torch.float32)),
    Header(Kind.OFFER, layout=Layout(((1, 2, 3, 4),) * 9, torch.float32, torch.float32)),
    Header(Kind.REQUEST, wire=torch.int64)])
def test_what_cannot_travel_is_refused(header):
    with pytest.raises(ValueError, match='expected'):
        encode_header(header)


@given(shapes, dtypes, st.sampled_from([None, torch.bfloat16, torch.float16]))
def test_tensors_travel_as_bytes(sizes, dtype, wire):
    levels = [(torch.rand(size) * 200).to(dtype) for size in sizes]
    layout, data = pack_levels(levels, wire)
    assert layout.nbytes == len(data) == sum(each.numel() for each in levels) * item_size(
        wire or dtype)
    same, parts = split(levels, wire)
    cut = len(data) // 3
    assert same == layout and len(parts) == len(data)
    assert torch.equal(torch.cat([parts.read(0, cut), parts.read(cut, len(data))]), data)
    for level, back in zip(levels, layout.unpack(data, CPU)):
        expected = level if wire is None else level.to(wire).to(dtype)
        assert back.dtype == dtype and back.shape == level.shape and torch.equal(back, expected)


def test_levels_that_are_not_such_are_refused():
    good = torch.zeros(1, 2, 3, 4)
    for levels in ([], [good] * 9, [good[0]], [good, good.double()], [good.long()]):
        with pytest.raises(ValueError, match='expected'):
            pack_levels(levels)
    layout, data = pack_levels([good])
    with pytest.raises(ValueError, match='95 bytes, expected 96'):
        layout.unpack(data[1:], CPU)


@pytest.mark.parametrize(('value', 'dtype'), [
    (255., torch.uint8), (0., torch.uint8), (256., torch.float32), (-1., torch.float32),
    (0.5, torch.float32), (float('nan'), torch.float32), (float('inf'), torch.float32)])
def test_images_travel_as_bytes_only_where_that_loses_nothing(value, dtype):
    images = torch.full((1, 3, 2, 2), 7.)
    images[0, 1, 1, 0] = value
    layout, data = pack_images(images)
    assert layout.dtype == dtype
    back, = layout.unpack(data, CPU)
    assert back.numpy().tobytes() == images.numpy().tobytes()


@given(st.integers(1, 20000), st.data())
def test_the_checksum_sees_bytes_that_changed_moved_or_are_missing(size, data):
    content = torch.randint(0, 256, (size,), dtype=torch.uint8)
    right = checksum(content)
    at = data.draw(st.integers(0, size - 1))
    changed = content.clone()
    changed[at] += data.draw(st.integers(1, 255))
    assert checksum(changed) != right
    assert checksum(content[:-1]) != right
    words = size // 8
    if words > 1:
        first, second = (data.draw(st.integers(0, words - 1)) * 8 for _ in range(2))
        moved = content.clone()
        moved[first:first + 8], moved[second:second + 8] = (
            content[second:second + 8], content[first:first + 8])
        assert (checksum(moved) == right) == torch.equal(moved, content)


def test_the_checksum_of_zeros_depends_on_their_number():
    assert len({checksum(torch.zeros(size, dtype=torch.uint8)) for size in range(0, 30000, 500)}
               ) == 60
