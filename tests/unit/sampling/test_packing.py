"""Samples as bytes and back: dtype, shape, metadata and structure intact."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mmseg.structures import SegDataSample

from mapsage.sampling.packing import pack_samples, unpack_samples, write_parcel
from mapsage_launcher.trust.sealed import BrokenSealError, seal

Pair = namedtuple('Pair', 'first second')
SECRET = b's' * 32

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def there_and_back(samples: list, offset: int = 3) -> list:
    """Pack and unpack, through a buffer in which nothing is aligned."""
    parcel = pack_samples(samples, SECRET)
    buffer = torch.zeros(offset + len(parcel.header) + parcel.payload_bytes, dtype=torch.uint8)
    assert write_parcel(parcel, buffer, offset) == len(buffer)
    return unpack_samples(buffer, offset, len(parcel.header), SECRET)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict):
        return (
            type(one) is type(other)
            and list(one) == list(other)
            and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('shape', [(), (1,), (0, 3), (3, 5), (2, 3, 4)], ids=str)
def test_tensors_of_every_kind(dtype: torch.dtype, shape: tuple) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    assert same(there_and_back([dict(x=tensor)]), [dict(x=tensor)])


def test_values_that_compare_badly_are_bit_equal() -> None:
    odd = torch.tensor([float('nan'), -0.0, float('inf'), 1e-45])
    back = there_and_back([odd])[0]
    assert back.numpy().tobytes() == odd.numpy().tobytes()


def test_views_leave_their_layout_and_graph() -> None:
    base = torch.arange(24.0, requires_grad=True)
    views = [
        base.view(4, 6).t(),
        base[::3],
        base.view(2, 3, 4)[:, 1],
        base.view(6, 4)[1:2].expand(3, 4),
        torch.tensor([1 + 2j]).conj(),
    ]
    for view, back in zip(views, there_and_back(views)):
        assert same(back, view.detach().resolve_conj())
        assert not back.requires_grad


def test_structure_and_metadata() -> None:
    samples = [
        dict(
            inputs=torch.rand(3, 4, 5),
            meta=dict(
                path=Path('a/b.png'),
                shape=(4, 5),
                scale=(0.5, 2.0),
                flip=None,
                names=['x'],
                seven={7: 'int key'},
                text='Straße',
            ),
        ),
        OrderedDict(
            b=np.arange(6, dtype=np.uint16).reshape(2, 3)[:, ::2],
            a=np.float32(0.25),
            scalar=np.array(3),
            pair=Pair(torch.ones(2), 'second'),
            empty={},
        ),
        (torch.zeros(1), [np.array(['text'], dtype=object)[0]], np.zeros((0, 2), '>f4')),
    ]
    assert same(there_and_back(samples), samples)


def test_data_elements_of_the_host_need_no_adapter() -> None:
    from mmengine.structures import PixelData

    sample = SegDataSample(metainfo=dict(img_path='a.png', ori_shape=(8, 8), flip=True))
    sample.gt_sem_seg = PixelData(data=torch.randint(0, 7, (1, 8, 8)))
    back = there_and_back([dict(inputs=torch.ones(3, 8, 8), data_samples=sample)])[0]
    assert type(back['data_samples']) is SegDataSample
    assert torch.equal(back['data_samples'].gt_sem_seg.data, sample.gt_sem_seg.data)
    assert back['data_samples'].metainfo == sample.metainfo
    back['data_samples'].gt_sem_seg = PixelData(data=torch.zeros(1, 4, 4))  # still its own checks
    assert back['data_samples'].gt_sem_seg.shape == (4, 4)


def test_no_array_is_in_the_header_and_what_is_twice_travels_once() -> None:
    tensor = torch.rand(256, 256)
    sample = dict(a=tensor, b=np.zeros(1000), c=tensor)
    parcel = pack_samples([sample, sample], SECRET)
    assert parcel.payload_bytes == 256 * 256 * 4 + 8000
    assert len(parcel.header) < 500
    back = there_and_back([sample, sample])
    assert back[0]['a'] is back[0]['c']


class Fresh:
    """Its state is a tensor that lives no longer than the pickler looks at it."""

    def __init__(self, number: float = 0.0) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return Fresh, (), torch.full((4,), self.number)

    def __setstate__(self, state: torch.Tensor) -> None:
        self.number = state[0].item()


def test_tensors_made_while_packing_are_not_taken_for_each_other() -> None:
    back = there_and_back([Fresh(float(k)) for k in range(20)])
    assert [each.number for each in back] == list(range(20))


def test_what_cannot_travel_is_refused() -> None:
    with pytest.raises(TypeError, match='sparse.*to_dense'):
        pack_samples([torch.eye(3).to_sparse()], SECRET)
    with pytest.raises(TypeError, match='quint8.*dequantize'):
        pack_samples([torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)], SECRET)


class Height(torch.Tensor):
    """A tensor with a unit."""


class Weight(torch.nn.Parameter):
    """A parameter of another class."""


class Doubled(torch.Tensor):
    """A tensor without data of its own: it holds another one, and computes with its double."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, dtype=inner.dtype
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Doubled, (self.inner,)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def plain(value: Any) -> Any:
            return value.inner * 2 if isinstance(value, Doubled) else value

        return function(*map(plain, args), **(kwargs or {}))


def test_classes_and_attributes_of_tensors_stay() -> None:
    """A batch would otherwise mix types, by the rank that a sample comes from."""
    height = torch.rand(3, 4).as_subclass(Height)
    height.unit = 'm'
    named = torch.rand(2)
    named.role = 'prior'  # type: ignore[attr-defined]
    samples = [
        height,
        height[1:],
        named,
        torch.nn.Parameter(torch.rand(2)),
        torch.nn.Parameter(torch.arange(3), requires_grad=False),
        Weight(torch.rand(1)),
    ]
    back = there_and_back(samples)
    for sample, moved in zip(samples, back):
        assert type(moved) is type(sample) and moved.requires_grad == sample.requires_grad
        assert moved.__dict__ == sample.__dict__ and moved.is_leaf
        assert same(
            moved.detach().as_subclass(torch.Tensor), sample.detach().as_subclass(torch.Tensor)
        )
    assert back[0].unit == 'm' and back[2].role == 'prior'


def test_a_tensor_of_a_subclass_that_occurs_twice_is_sent_once() -> None:
    height = torch.rand(100, 100).as_subclass(Height)
    assert pack_samples([height, height, dict(x=height)], SECRET).payload_bytes == 40000
    first, second, third = there_and_back([height, height, dict(x=height)])
    assert first is second is third['x']


def test_a_view_of_a_subclass_sends_what_it_shows() -> None:
    wide = torch.rand(1000, 1000).as_subclass(Height)
    parcel = pack_samples([wide[:2, :3]], SECRET)
    assert parcel.payload_bytes == 24 and len(parcel.header) < 1000


@pytest.mark.skipif(
    not hasattr(torch.Tensor, '_make_wrapper_subclass'), reason='this PyTorch has no such tensors'
)
def test_a_class_that_computes_by_itself_is_pickled_by_itself() -> None:
    [back] = there_and_back([Doubled(torch.arange(3.0))])
    assert type(back) is Doubled and torch.equal(back + 0, torch.arange(3.0) * 2)


class Attack:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize('secret', [None, b'of another job' * 3])
def test_a_header_without_the_seal_of_the_job_is_never_unpickled(
    secret: Any, tmp_path: Path
) -> None:
    header = pickle.dumps(([], pickle.dumps([Attack(tmp_path / 'ran')])))
    header = bytes(32) + header if secret is None else seal(header, secret, 'samples')
    buffer = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    with pytest.raises(BrokenSealError, match='same MAPSAGE_SECRET'):
        unpack_samples(buffer, 0, len(header), SECRET)
    assert not (tmp_path / 'ran').exists()
    # the attack works where the seal is right
    header = seal(pickle.dumps(([], pickle.dumps([Attack(tmp_path / 'ran')]))), SECRET, 'samples')
    unpack_samples(torch.frombuffer(bytearray(header), dtype=torch.uint8), 0, len(header), SECRET)
    assert (tmp_path / 'ran').exists()


@pytest.mark.parametrize('size', [-1, 2**40])
def test_a_changed_size_of_a_header_is_noticed(size: int) -> None:
    parcel = pack_samples([dict(index=1)], SECRET)
    buffer = torch.frombuffer(bytearray(parcel.header), dtype=torch.uint8)
    with pytest.raises(BrokenSealError, match=f'header of {size} bytes'):
        unpack_samples(buffer, 0, size, SECRET)


@pytest.mark.parametrize('place', [0, 31, 32, -1])
def test_one_changed_bit_of_a_header_is_noticed(place: int) -> None:
    parcel = pack_samples([dict(index=1)], SECRET)
    header = bytearray(parcel.header)
    header[place] ^= 1
    with pytest.raises(BrokenSealError):
        unpack_samples(torch.frombuffer(header, dtype=torch.uint8), 0, len(header), SECRET)
