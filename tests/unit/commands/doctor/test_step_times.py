"""Which of float32 and bfloat16 the doctor recommends, and what keeps it from a comparison."""
from __future__ import annotations

import time
from typing import Any, Dict, List, Tuple

import pytest
import torch
from mmengine.config import Config
from mmengine.structures import BaseDataElement
from toy_runs import ToyRegression

from mapsage.accelerator import resolve_accelerator
from mapsage.accelerator.xla import XlaAccelerator
from mapsage.commands.doctor.finding import Finding
from mapsage.commands.doctor.step_times import compare_precisions, judge

CPU = resolve_accelerator('cpu')
AMP = dict(optim_wrapper=dict(type='AmpOptimWrapper', dtype='bfloat16'))


def samples() -> List[Dict[str, Any]]:
    return [dict(inputs=torch.ones(8), data_samples=BaseDataElement(target=torch.ones(1)))]


def compared(model: Any, batch_size: int = 4, seconds: float = 1e-4, **options: Any) -> Finding:
    cfg = Config(dict(train_dataloader=dict(batch_size=batch_size), default_scope='mmengine'))
    (finding, ) = compare_precisions(cfg, model, samples(), seconds,
                                     options.pop('accelerator', CPU), **options)
    return finding


@pytest.mark.parametrize('wide, narrow, amp, level, words', [
    ([.30, .31, .60], [.20, .20, .40], False, 'ok', 'takes 310 ms in float32 and 200 ms in '
     'bfloat16 (median of 3): bfloat16 is 1.50 times as fast here'),
    ([.20], [.25], False, 'ok', 'bfloat16 loses here, at 0.80 of the speed'),
    ([.20], [.25], True, 'note', 'bfloat16 loses here, at 0.80 of the speed'),
    ([.20], [.201], True, 'ok', '(median of 1): no difference here')])
def test_the_sentence(wide: list, narrow: list, amp: bool, level: str, words: str,
                      monkeypatch: Any) -> None:
    monkeypatch.setattr(type(CPU), 'native_bfloat16', lambda self: False)
    taken = {torch.float32: wide, torch.bfloat16: narrow}
    finding = judge(taken, 2, 8, CPU, amp)
    assert finding.level == level and words in finding.text, finding
    assert '2 image(s) of the 8 on cpu' in finding.text
    assert finding.text.endswith(
        'it has no bfloat16 in hardware, and computes it by way of float32')
    assert bool(finding.next_step) == (amp and level == 'note' or wide[0] > 1.1 * narrow[0])
    monkeypatch.setattr(type(CPU), 'native_bfloat16', lambda self: True)
    assert 'of its own' not in judge(taken, 8, 8, CPU, amp).text


class DTypes(ToyRegression):
    """Notes in which dtype it computes, and may fail in one of them."""

    seen: List[Tuple[torch.dtype, int, bool]] = []
    fails: Any = None

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        values = self.layers[0](torch.stack(list(inputs)))
        self.seen.append((values.dtype, len(values), self.training))
        if values.dtype == self.fails:
            raise RuntimeError('"some_kernel" not implemented')
        return dict(loss=self.layers[4](values).float().mean())


def test_both_dtypes_are_timed_in_turns_on_a_copy() -> None:
    model = DTypes().eval()
    DTypes.seen, state = [], torch.get_rng_state()
    finding = compared(model)
    assert finding.level in ('ok', 'note') and '4 image(s) on cpu' in finding.text
    assert '(median of 5)' in finding.text
    assert DTypes.seen == [(torch.float32, 4, True), (torch.bfloat16, 4, True)] * 6
    assert all(each.grad is None for each in model.parameters()) and not model.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize('dtype, advice', [
    (torch.bfloat16, 'train without --amp'), (torch.float32, 'a smaller batch or crop')])
def test_a_model_that_fails_is_a_sentence(dtype: Any, advice: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(DTypes, 'fails', dtype)
    finding = compared(DTypes())
    assert finding.level == 'note' and advice in finding.next_step
    assert f'a training step in {str(dtype)[6:]} on cpu fails: RuntimeError: "some_kernel" not ' \
        'implemented' in finding.text


def test_a_large_model_does_not_hold_the_doctor_up() -> None:
    DTypes.seen = []
    finding = compared(DTypes(), batch_size=16, seconds=.1, budget=6.)
    assert '2 image(s) of the 16 on cpu' in finding.text
    DTypes.seen = []
    finding = compared(DTypes(), batch_size=16, seconds=30., budget=6.)
    assert (finding.level, DTypes.seen) == ('no', [])
    assert 'a step of 2 image(s) would take about 240 s here, and the doctor takes 6 s' \
        in finding.text


def test_it_ends_with_its_budget(monkeypatch: Any) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(time, 'perf_counter', lambda: 10. * next(clock))
    assert '(median of 1)' in compared(DTypes()).text


def test_devices_on_which_it_says_nothing() -> None:
    lazy: Any = XlaAccelerator.__new__(XlaAccelerator)
    finding = compared(DTypes(), accelerator=lazy)
    assert finding.level == 'no' and 'not timed on xla: it compiles its first steps' in finding.text
