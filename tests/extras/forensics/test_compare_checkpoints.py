"""Two checkpoints are equal, or the tensor that differs most is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mapsage.extras.forensics.compare_checkpoints import compare_checkpoints

NAN, INF = float('nan'), float('inf')


def save(path: Path, *, bare: bool = False, **changes: Any) -> str:
    weights = {
        'a': torch.tensor([3.0, -4.0]),
        'b': torch.tensor([NAN, INF, 1.0]),
        'count': torch.tensor(2**40),
        'half': torch.ones(3).bfloat16(),
        'none': torch.empty(0),
        **changes,
    }
    kept = {name: value for name, value in weights.items() if value is not None}
    torch.save(kept if bare else dict(state_dict=kept, meta={}), path)
    return str(path)


@pytest.mark.parametrize(
    'changes, equal, total, largest, name',
    [
        ({}, 5, 5, 0.0, ''),
        ({'a': torch.tensor([3.0, -4.5])}, 4, 5, 0.5 / 12.5**0.5, 'a'),
        ({'a': torch.tensor([NAN, -4.0])}, 4, 5, INF, 'a'),
        ({'b': torch.tensor([NAN, INF, 1.0 + 2**-20])}, 4, 5, INF, 'b'),  # its size is infinite
        ({'a': torch.tensor([[3.0, -4.0]])}, 4, 5, INF, 'a'),
        ({'a': torch.tensor([3.0, -4.0]).double()}, 4, 5, INF, 'a'),
        ({'half': None}, 4, 5, INF, 'half'),
        ({'more': torch.ones(1)}, 5, 6, INF, 'more'),
        ({'count': torch.tensor(2**40 + 1)}, 4, 5, 2.0**-40, 'count'),
    ],
)
def test_what_differs(
    changes: Any, equal: int, total: int, largest: float, name: str, tmp_path: Path
) -> None:
    one = save(tmp_path / 'one.pth')
    found = compare_checkpoints(one, save(tmp_path / 'other.pth', bare=True, **changes))
    assert (found.equal, found.total, found.name) == (equal, total, name)
    assert found.largest == pytest.approx(largest)
    assert f'{equal} of {total} tensors are equal bit for bit' in str(found)
    assert (repr(name) in str(found)) == bool(name)


def test_zero_and_minus_zero_are_other_bits_of_one_number(tmp_path: Path) -> None:
    found = compare_checkpoints(
        save(tmp_path / 'one.pth', a=torch.tensor([0.0])),
        save(tmp_path / 'other.pth', a=torch.tensor([-0.0])),
    )
    assert (found.equal, found.largest, found.name) == (4, 0.0, 'a')


def test_a_file_without_weights_is_refused(tmp_path: Path) -> None:
    torch.save(dict(meta={}), tmp_path / 'empty.pth')
    with pytest.raises(ValueError, match='holds no weights'):
        compare_checkpoints(save(tmp_path / 'one.pth'), str(tmp_path / 'empty.pth'))
