"""Checkpoints of weights on a card: copied once, into pinned memory that is used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch
from checkpoint_bits import checkpoint_bits
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from toy_runs import toy_runner, toy_train

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.engine.checkpoints.host_copy import HostCopies


class Copies(TorchDispatchMode):
    """Counts copies from a card that the host waits for, that it does not, and within the host."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = dict(waited=0, background=0, host=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].is_cuda:
            self.counts['waited'] += kwargs.get('device') == torch.device('cpu')
        if func is torch.ops.aten.copy_.default and args[0].is_cpu:
            in_background = args[1].is_cuda and (args[2] if len(args) > 2 else False)
            self.counts['background' if in_background else 'host'] += 1
        return func(*args, **kwargs)


def weights() -> Dict[str, torch.Tensor]:
    images = torch.randn(2, 3, 4, 5)
    # The transposed tensor comes first, because the host waits for all copies before it.
    return dict(
        transposed=torch.randn(3, 5).t(),
        weight=torch.randn(300, 400),
        step=torch.tensor(7),
        half=torch.randn(5).bfloat16(),
        last=images.contiguous(memory_format=torch.channels_last),
    )


def on_card(tensors: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    return {name: tensor.to('cuda') for name, tensor in tensors.items()}


def copy_twice() -> Tuple[List[Dict[str, int]], List[List[int]], bool, bool]:
    set_current_accelerator(resolve_accelerator('cuda'))
    copies, counts, addresses, equal, pinned = HostCopies(), [], [], True, True
    for _ in range(2):
        tensors = weights()
        moved = on_card(tensors)
        with Copies() as counted:
            copied = copies.copy(dict(state_dict=copies.to_host(moved)))['state_dict']
        # Nothing asks the card before this, so that a copy that is late would show.
        equal &= all(torch.equal(copied[name], tensor) for name, tensor in tensors.items())
        counts.append(counted.counts)
        addresses.append([copied[name].data_ptr() for name in sorted(copied)])
        for name, tensor in tensors.items():
            equal &= copied[name].stride() == tensor.stride()
            pinned &= name == 'transposed' or copied[name].is_pinned()
        copies.release()
    return counts, addresses, equal, pinned


def test_one_copy_of_each_tensor(tmp_path: Path) -> None:
    # The transposed tensor has a layout of its own, and takes the way of MMEngine.
    [(counts, addresses, equal, pinned)] = run_ranks(
        copy_twice, 1, tmp_path, environ={'CUDA_DOUBLE_LATE_COPIES': '1'}
    )
    assert counts == [dict(waited=1, background=4, host=1)] * 2
    assert addresses[0] == addresses[1]
    assert equal and pinned


def copy_from_two_cards() -> List[bool]:
    set_current_accelerator(resolve_accelerator('cuda'))
    copies, equal = HostCopies(), []
    for _ in range(2):  # in buffers that hold the values of the save before
        tensors = dict(first=torch.randn(300, 400), second=torch.randn(300, 400))
        moved = dict(first=tensors['first'].to('cuda:0'), second=tensors['second'].to('cuda:1'))
        copied = copies.copy(dict(state_dict=copies.to_host(moved)))['state_dict']
        equal += [torch.equal(copied[name], tensor) for name, tensor in tensors.items()]
        copies.release()
    return equal


def test_a_model_over_two_cards_is_copied_whole(tmp_path: Path) -> None:
    [equal] = run_ranks(
        copy_from_two_cards,
        1,
        tmp_path,
        environ={'CUDA_DOUBLE_LATE_COPIES': '200', 'CUDA_DOUBLE_DEVICES': '2'},
    )
    assert equal == [True] * 4


ADAM = {
    'env_cfg.accelerator': 'cuda',
    'optim_wrapper.optimizer': dict(_delete_=True, type='Adam', lr=0.01),
}


def copy_best_and_last() -> Tuple[bool, int, int]:
    """Return whether both copies share memory, and the numbers of buffers of two saves."""
    set_current_accelerator(resolve_accelerator('cuda'))
    copies, tensors, buffers, shared = HostCopies(), on_card(weights()), [], True
    for _ in range(2):
        best, last = (
            copies.copy(dict(state_dict=copies.to_host(tensors)))['state_dict'] for _ in range(2)
        )
        shared &= all(best[name].data_ptr() == last[name].data_ptr() for name in best)
        shared &= all(torch.equal(last[name], tensors[name].cpu()) for name in last)
        copies.release()
        buffers.append(sum(map(len, copies._free.values())))
    return shared, buffers[0], buffers[1]


def test_the_best_checkpoint_and_the_last_one_share_memory(tmp_path: Path) -> None:
    # The buffers of the second copy, which served a comparison alone, are not kept.
    assert run_ranks(copy_best_and_last, 1, tmp_path) == [(True, 5, 5)]


def train(folder: Path) -> Tuple[Any, bool]:
    """Return the bits of a checkpoint, and whether the last one has the values of the card."""
    runner, _ = toy_train(folder, **ADAM)
    saved = torch.load(folder / 'iter_8.pth', weights_only=False)
    moments = [state['exp_avg'] for state in runner.optim_wrapper.optimizer.state.values()]
    stored = [state['exp_avg'] for state in saved['optimizer']['state'].values()]
    equal = len(moments) == len(stored) > 0 and all(
        torch.equal(value.cpu(), other) for value, other in zip(moments, stored)
    )
    return checkpoint_bits(folder / 'iter_4.pth'), equal and all(
        torch.equal(value.cpu(), saved['state_dict'][name])
        for name, value in runner.model.module.state_dict().items()
    )


def resume(folder: Path) -> int:
    runner, _ = toy_runner(folder, resume=True, **ADAM)
    runner.train()
    return int(runner.iter)


def test_the_checkpoints_of_a_run_hold_what_the_card_held(tmp_path: Path) -> None:
    late = {'CUDA_DOUBLE_LATE_COPIES': '1'}
    [(bits, equal)] = run_ranks(train, 1, tmp_path / 'late', tmp_path / 'run', environ=late)
    assert equal
    [(others, _)] = run_ranks(train, 1, tmp_path / 'early', tmp_path / 'other')
    assert bits == others
    (tmp_path / 'run' / 'iter_8.pth').unlink()
    (tmp_path / 'run' / 'last_checkpoint').write_text(str(tmp_path / 'run' / 'iter_4.pth'))
    assert run_ranks(resume, 1, tmp_path / 'again', tmp_path / 'run') == [8]
