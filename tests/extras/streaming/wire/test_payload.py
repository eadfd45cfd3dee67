"""Tensors come out of their bytes as they went in, and a checksum notices other bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mapsage.extras.streaming.encoder_gate import as_levels
from mapsage.extras.streaming.wire.header import Header, Kind, decode_header, encode_header
from mapsage.extras.streaming.wire.payload import (
    DTYPES,
    checksum,
    item_size,
    pack_images,
    pack_levels,
    split,
)

CPU = torch.device('cpu')
dtypes = st.sampled_from(DTYPES)
shapes = st.lists(st.tuples(*[st.integers(0, 40)] * 4), min_size=1, max_size=8).map(tuple)


@given(shapes, dtypes, st.sampled_from([None, torch.bfloat16, torch.float16]))
def test_tensors_travel_as_bytes(sizes, dtype, wire):
    levels = [(torch.rand(size) * 200).to(dtype) for size in sizes]
    layout, data = pack_levels(levels, wire)
    assert (
        layout.nbytes
        == len(data)
        == sum(each.numel() for each in levels) * item_size(wire or dtype)
    )
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


@pytest.mark.parametrize('wire', [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_days_of_stacks_travel_exactly(dtype, wire):
    features, days = torch.rand(1, 2, 3, 4).to(dtype), torch.full((1, 1, 3, 4), 261.0)
    encoder = torch.nn.Identity()
    encoder.returns_facts = True
    layout, data = pack_levels(as_levels((features, days), encoder), wire)
    header = decode_header(encode_header(Header(Kind.OFFER, total=len(data), layout=layout)))
    assert header.layout == layout and layout.nbytes == len(data)
    first, last = layout.unpack(data, CPU)
    assert first.dtype == dtype and last.dtype == torch.float32 and torch.equal(last, days)


@pytest.mark.parametrize(
    ('value', 'dtype'),
    [
        (255.0, torch.uint8),
        (0.0, torch.uint8),
        (256.0, torch.float32),
        (-1.0, torch.float32),
        (0.5, torch.float32),
        (float('nan'), torch.float32),
        (float('inf'), torch.float32),
    ],
)
def test_images_travel_as_bytes_only_where_that_loses_nothing(value, dtype):
    images = torch.full((1, 3, 2, 2), 7.0)
    images[0, 1, 1, 0] = value
    layout, data = pack_images(images)
    assert layout.dtype == dtype
    (back,) = layout.unpack(data, CPU)
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
        moved[first : first + 8], moved[second : second + 8] = (
            content[second : second + 8],
            content[first : first + 8],
        )
        assert (checksum(moved) == right) == torch.equal(moved, content)


def test_the_checksum_of_zeros_depends_on_their_number():
    assert (
        len({checksum(torch.zeros(size, dtype=torch.uint8)) for size in range(0, 30000, 500)}) == 60
    )
