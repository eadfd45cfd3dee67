"""What the vendor's cards do otherwise than a CPU; docs/reference/simulator.md has the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Iterator, Tuple

import pytest
import torch
from support import no_simulated_cards
from test_simulator import run_python
from torch import nn

from mapsage.accelerator import resolve_accelerator
from mapsage.extras.simulator.devices import library
from mapsage.extras.simulator.load import set_profile
from mapsage.extras.simulator.profiles import DEFAULT, PROFILES

reason = no_simulated_cards()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

WIDE = [2**40 + 5, 2**31, -(2**31) - 1, 2**31 - 1, -(2**31), 255, -100]
WRAPPED = [5, -(2**31), 2**31 - 1, 2**31 - 1, -(2**31), 255, -100]
REFUSED = 'Call TOPSOP fail, got error: TOPSATEN_STATUS_NOT_SUPPORT!\n'


@pytest.fixture(scope='module', autouse=True)
def sim() -> Any:
    return resolve_accelerator('sim')


@pytest.fixture
def whole_int64() -> Iterator[None]:
    """The quirks of the profile 2.10-int64, in this process."""
    set_profile(library(), PROFILES['2.10-int64'])
    yield
    set_profile(library(), PROFILES[DEFAULT])


@pytest.mark.parametrize(
    'copy',
    [
        lambda values: values.gcu(1),
        lambda values: torch.zeros(7, dtype=torch.int64, device='gcu:1').copy_(values),
        lambda values: torch.zeros(7, 3, dtype=torch.int64, device='gcu:1')[:, 1].copy_(values),
        lambda values: torch.tensor(values.tolist(), device='gcu:1'),
        lambda values: values.gcu(2).to('gcu:1'),
    ],
    ids=['to', 'copy_', 'into columns', 'tensor', 'between cards'],
)
def test_a_copy_of_int64_wraps(copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Row 3."""
    assert copy(torch.tensor(WIDE)).cpu().tolist() == WRAPPED


def test_float64_has_the_precision_and_the_range_of_float32() -> None:
    """Row 3."""
    exact = torch.tensor([1 / 3, 1e300, -1e300, float('nan'), 0.5], dtype=torch.float64)
    kept = exact.gcu().cpu()
    assert kept.dtype == torch.float64
    assert torch.equal(kept.nan_to_num(9, 7, -7), exact.float().double().nan_to_num(9, 7, -7))
    assert kept[1] == float('inf') and kept[0] != exact[0]
    assert (torch.ones(1, dtype=torch.float64).gcu() + 1e-12).item() == 1


def test_kernels_wrap_int64_too() -> None:
    """Row 3."""
    most = torch.tensor([2**31 - 1]).gcu()
    assert (most + 1).cpu().tolist() == [-(2**31)]
    most += 2
    assert most.cpu().tolist() == [-(2**31) + 1]
    assert torch.arange(2**31, 2**31 + 2, device='gcu:0').cpu().tolist() == [-(2**31), -(2**31) + 1]


def test_fill_clamps() -> None:
    """Row 3: so `fill_` and `copy_` disagree."""
    filled = torch.empty(2, dtype=torch.int64, device='gcu:0')
    assert filled.fill_(2**40).cpu().tolist() == [2**31 - 1] * 2
    assert filled.fill_(-(2**40)).cpu().tolist() == [-(2**31)] * 2
    assert torch.full((1,), 2**33, device='gcu:0').item() == 2**31 - 1
    large = torch.full((1,), 1e300, dtype=torch.float64, device='gcu:0')
    assert large.item() == torch.finfo(torch.float32).max


def test_narrowing_warns_once_a_type_in_the_vendors_words(tmp_path: Path) -> None:
    """Row 3."""
    done = run_python(
        """
for _ in range(2):
    torch.tensor([3]).gcu()
    torch.arange(4, device='gcu:1').argmax()
    torch.ones(1, dtype=torch.float64).gcu()
torch.full((1,), 2**40, device='gcu:0')
torch.ones(3, dtype=torch.int32).gcu()
""",
        tmp_path,
    )
    end = 'replace, maybe lead to unexpected overflow issues.'
    assert done.stdout.count(f'GCU not support Long use Int {end}') == 1, done.stdout
    assert done.stdout.count(f'GCU not support Double use Float {end}') == 1
    assert (
        done.stdout.count(
            'GCU not support fill 1099511627776 to an Long tensor. Fill 2147483647 instead.'
        )
        == 1
    )
    assert done.stdout.count('UserWarning') == 3


def test_with_the_variable_int64_is_whole_and_not_computed(whole_int64: None) -> None:
    """Rows 3 and 4."""
    wide = torch.tensor(WIDE).gcu()
    assert wide.cpu().tolist() == WIDE
    assert torch.full((1,), 2**40, device='gcu:0').item() == 2**40
    assert torch.ones(1, dtype=torch.float64).gcu().add(1e-12).item() == 1, 'float64 is narrowed'
    mask = wide.float() > 0
    norm, images = nn.BatchNorm2d(1).gcu(), torch.ones(2, 1, 2, 2).gcu()
    kernels: Tuple[Tuple[str, Callable[[], Any]], ...] = (
        ('topsatenAdd ', lambda: wide + 1),
        ('topsatenMul ', lambda: wide * wide),
        ('topsatenMax ', lambda: wide.max()),
        ('topsatenMaskedFill ', lambda: wide.masked_fill(mask, 0)),
        # It counts its batches.
        ('topsatenAdd ', lambda: norm(images)),
    )
    for kernel, compute in kernels:
        with pytest.raises(RuntimeError) as caught:
            compute()
        assert str(caught.value).startswith(REFUSED + kernel)
    assert (wide + 0.5).dtype == torch.float32
    assert (torch.tensor([3], dtype=torch.int32).gcu() + 1).item() == 4


@pytest.mark.parametrize(
    'compute',
    [
        lambda half: half.sum(dtype=torch.float32),
        lambda half: half.sum(0, dtype=torch.float32),
        lambda half: half.bfloat16().cumsum(0, dtype=torch.float32),
        lambda half: half.prod(dtype=torch.float32),
    ],
    ids=['sum', 'sum of a dim', 'cumsum', 'prod'],
)
def test_mixed_precision_reductions_are_refused(compute: Callable[[torch.Tensor], Any]) -> None:
    """Row 7."""
    half = torch.ones(4, device='gcu:0', dtype=torch.float16)
    with pytest.raises(RuntimeError, match=REFUSED + 'topsaten'):
        compute(half)


def test_other_sums_work() -> None:
    """Row 7. Under autocast, PyTorch's lists ask for the sum of a half tensor in float32."""
    half = torch.ones(4, device='gcu:0', dtype=torch.float16)
    assert half.float().sum().item() == half.sum().item() == 4
    assert half.sum(dtype=torch.float16).item() == (half > 0).sum().item() == 4
    with torch.autocast('gcu', torch.bfloat16):
        assert half.float().sum().item() == 4
        with pytest.raises(RuntimeError, match='topsatenSum'):
            half.sum()


def test_max_and_min_do_not_see_nan() -> None:
    """Row 8."""
    nan = float('nan')
    values = torch.tensor([[1, nan, 3], [nan, nan, nan]]).gcu()
    assert values[0].max().item() == 3 and values[0].min().item() == 1
    assert values.max(1).values.cpu().tolist() == [3, -float('inf')]
    assert values.min(1).values.cpu().tolist() == [1, float('inf')]
    assert values.isfinite().sum().item() == 2, 'the values themselves are as they were'
    assert values.sum().isnan().item()


def test_memory_has_one_data_type() -> None:
    """Row 31."""
    values = torch.ones(4, device='gcu:0')
    with pytest.raises(RuntimeError, match='a view of Float memory as Int is not supported'):
        values.view(torch.int32)
    assert values.view(torch.float32).view(2, 2).sum().item() == 4


def test_sync_bn_has_no_kernels() -> None:
    """Row 9."""
    with pytest.raises(NotImplementedError, match='batch_norm_stats'):
        torch.batch_norm_stats(torch.ones(2, 2, 2).gcu(), 1e-5)


def test_torch_accelerator_has_no_account_of_memory() -> None:
    """Row 28."""
    if not hasattr(torch.accelerator, 'memory_allocated'):
        pytest.skip('torch.accelerator has no memory functions before torch 2.9')
    with pytest.raises(RuntimeError, match='INTERNAL ASSERT'):
        torch.accelerator.memory_allocated()


def test_the_scaler_tells_of_an_overflow(capsys: pytest.CaptureFixture) -> None:
    """Row 29."""
    weight = nn.Parameter(torch.ones(2, device='gcu:0'))
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler = torch.gcu.amp.GradScaler(init_scale=2.0)
    for factor in (1.0, float('inf')):
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert capsys.readouterr().out == 'Gradient overflow. Skipping step\n'
    assert scaler.get_scale() == 1
