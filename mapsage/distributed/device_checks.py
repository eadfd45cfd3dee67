"""Checks of devices, weights and batches before and while ranks train together.

Each check returns the problems it found on this rank, as texts that say what was found, what was
expected and what to do; an empty list means that all is well. ``DeviceCheckHook`` and the doctor
gather them.

    check_device(accelerator, local_rank) -> problems
    check_collectives(accelerator, local_rank) -> {name of a wrong collective: what is wrong}
    check_placement(module, devices) -> problems
    check_finite(module) -> problems
"""
from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

import torch
import torch.distributed as dist
from torch import nn

from mapsage.accelerator import Accelerator, AcceleratorError
from mapsage.accelerator.cuda import WORKSPACE

from .channels.agreement import error_text, raise_together
from .channels.group_channel import open_channel
from .groups.process_group import uses_native_group

SELF_TEST_SECONDS = 60.0
_SHOWN = 3  # number of problems of one kind that are listed


def check_device(accelerator: Accelerator, local_rank: int) -> List[str]:
    """Return problems with a small computation of known result on this rank's device."""
    try:
        device = accelerator.device(local_rank)
        # whole numbers below 2**24 are exact in float32 on every device and use no random state
        matrix = torch.arange(64, dtype=torch.float32).reshape(8, 8)
        found = (matrix.to(device) @ matrix.to(device)).cpu()
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        return [f'{accelerator.name} device of local rank {local_rank} cannot allocate and compute '
                f'({error_text(error)}). {_advice(error)}']
    if not torch.equal(found, matrix @ matrix):
        return [f'{device} computes wrong numbers: an 8x8 product of whole numbers is off by '
                f'{float((found - matrix @ matrix).abs().max()):g}, expected 0. Take this card out '
                f'of service.']
    return []


def _advice(error: BaseException) -> str:
    if WORKSPACE in str(error):
        return (f'The card is sound: this is the setting of cuBLAS for deterministic=True. Unset '
                f'{WORKSPACE}, which is {os.environ.get(WORKSPACE, "not set")!r} here, and MapSage '
                f'sets it, or set it to :4096:8.')
    if 'out of memory' in str(error):
        return 'Free its memory, or take another card.'
    return 'Look at the card with the tool of its vendor, or take another one.'


def card_identity(accelerator: Accelerator, local_rank: int) -> Optional[str]:
    """Return a text that only ranks on the same card share; None where sharing is allowed.

    This is the vendor's name of the card. Where there is none, indices are compared between ranks
    with equal device masks on one host; where the masks differ, the same index may mean a different
    card, so nothing is reported.
    """
    if accelerator.device_type == 'cpu' or accelerator.name == 'xla':
        return None  # processes share a CPU, and under PJRT each has its own client
    boot = Path('/proc/sys/kernel/random/boot_id')
    host = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    card = accelerator.card(local_rank)
    if card is not None:
        return f'{host} {card}'
    masks = [os.environ.get(name) for name in accelerator.masks]
    return f'{host} {masks} {accelerator.device(local_rank)}'


def check_own_cards(accelerator: Accelerator, local_rank: int) -> None:
    """Raise on every rank when two ranks were given the same card. Collective.

    It uses the CPU's path only: a vendor's collectives may hang or fail without a reason then.

    Raises:
        AcceleratorError: Naming the ranks.
        RankLostError: Naming the ranks that did not come.
    """
    error: Optional[Exception] = None
    mine = ''
    try:
        mine = card_identity(accelerator, local_rank) or ''
    except Exception as raised:  # of the vendor's software; the other ranks must hear of it
        error = raised
    channel = open_channel()
    every = channel.gather_texts('raised' if error else mine)
    if 'raised' in every:
        raise_together(channel, error, "reading the card's name")
    shared = shared_cards([each or None for each in every])
    if shared:
        pairs = '; '.join(f'rank {channel.ranks[rank]} is on the card of rank(s) '
                          f'{[channel.ranks[each] for each in others]}'
                          for rank, others in shared.items())
        masks = ' and '.join(accelerator.masks) or 'the device masks'
        raise AcceleratorError(
            f'{pairs}. Every rank of a machine needs a card of its own: give each a different '
            f'LOCAL_RANK, or, where each sees one card only, a different one in {masks}.')


def shared_cards(identities: Sequence[Optional[str]]) -> Dict[int, List[int]]:
    """Return, for each rank that shares its card, the ranks it shares it with. Pure."""
    return {rank: [other for other, theirs in enumerate(identities)
                   if theirs == identity and other != rank]
            for rank, identity in enumerate(identities)
            if identity is not None and identities.count(identity) > 1}


def check_placement(module: nn.Module, devices: Sequence[torch.device]) -> List[str]:
    """Return a problem for every parameter and buffer that is on none of ``devices``."""
    stray = [(name, kind, tensor.device) for name, kind, tensor in _tensors(module)
             if not any(_is_on(tensor.device, device) for device in devices)]
    expected = ' or '.join(map(str, devices))
    return _shorten([
        f'{kind} {name!r} is on {device}, expected {expected}. Register it before the model is '
        f'wrapped, and create new tensors with device=some_parameter.device.'
        for name, kind, device in stray], 'more tensor(s) are elsewhere')


def not_finite(module: nn.Module) -> Set[str]:
    """Return the names of parameters and running statistics that hold NaN or infinity."""
    return not_finite_tensors((name, tensor) for name, kind, tensor in _tensors(module)
                              if kind == 'parameter' or is_statistic(name))


def is_statistic(name: str) -> bool:
    """Return whether a buffer holds the running statistics of a normalization layer.

    Other buffers may be infinite on purpose: a mask, the smallest value so far.
    """
    return name.rpartition('.')[2] in ('running_mean', 'running_var')


def not_finite_tensors(named: Iterable[Tuple[str, torch.Tensor]]) -> Set[str]:
    """Return the names of the floating-point tensors that hold NaN or infinity.

    It computes one sum per tensor and reads one value per device: a sum is finite only if all its
    terms are. Tensors of an XLA device are copied to the host, since it would compile the sums.
    """
    sums: Dict[torch.device, List[Tuple[str, torch.Tensor, torch.Tensor]]] = {}
    for name, tensor in named:
        if tensor.is_floating_point():
            tensor = tensor.detach().cpu() if tensor.device.type == 'xla' else tensor
            # in float32: a float16 sum overflows although its terms are finite
            total = tensor.detach().sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
            sums.setdefault(tensor.device, []).append((name, tensor, total.float()))
    found: Set[str] = set()
    for entries in sums.values():
        good = torch.stack([total for _, _, total in entries]).isfinite().tolist()
        found.update(name for (name, tensor, _), fine in zip(entries, good)
                     if not fine and not bool(tensor.detach().isfinite().all()))
    return found


def check_finite(module: nn.Module, besides: Iterable[str] = ()) -> List[str]:
    """Return a problem for every name of :func:`not_finite` that is not in ``besides``."""
    found = not_finite(module).difference(besides)
    kinds = {name: kind for name, kind, _ in _tensors(module)}
    return _shorten([
        f'{kinds[name]} {name!r} holds NaN or infinity, expected finite numbers. Lower the '
        f'learning rate or clip the gradients (optim_wrapper.clip_grad), and resume from a '
        f'checkpoint before this iteration.'
        for name in kinds if name in found], 'more tensor(s) are not finite')


def check_collectives(accelerator: Accelerator, local_rank: int,
                      timeout: float = SELF_TEST_SECONDS) -> Dict[str, str]:
    """Run each collective that training needs on device tensors of known answer. Collective.

    They run in a thread, so that one that never returns is found as well; none is tried after it.
    Nothing is checked without a process group, or where gradients go over a vendor's library
    outside torch.distributed.

    Args:
        accelerator: Accelerator in use.
        local_rank: Rank of this process on its node.
        timeout: Seconds the whole test may take.

    Returns:
        Texts of what is wrong, by the name of the collective; empty when all results on this rank
        are right.
    """
    if not dist.is_available() or not dist.is_initialized() or uses_native_group(accelerator):
        return {}
    wrong: Dict[str, str] = {}
    running = [next(iter(_COLLECTIVES))]

    def run() -> None:
        accelerator.set_device(local_rank)  # each thread has its own current device
        device = accelerator.device(local_rank)
        for name, collective in _COLLECTIVES.items():
            running[0] = name
            try:
                found, expected = collective(device)
                accelerator.flush()
                if not torch.equal(found.cpu(), expected):
                    wrong[name] = (f'{name} of {device.type} tensors over {dist.get_backend()} '
                                   f'answers {found.cpu().tolist()}, expected {expected.tolist()}')
            except Exception as error:  # would be lost with the thread
                wrong[name] = (f'{name} of {device.type} tensors over {dist.get_backend()} fails '
                               f'({error_text(error)})')
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        name = running[0]
        return {**wrong, name: f'{name} over {dist.get_backend()} did not end within {timeout:g} s'}
    return wrong


def describe_batch(batch: Any, padded_size: Optional[Sequence[int]] = None,
                   uneven: bool = False) -> Dict[str, str]:
    """Return texts for the properties of a collated batch that must be equal across ranks.

    These are keys, dtypes, number of samples and shapes. The height and width of
    single samples may differ where the model's preprocessor pads them: up to ``padded_size`` they
    count as that size, and without one they are left out.

    Args:
        batch: Batch from MMEngine's collate: nested dicts and lists of tensors, and of elements
            that have ``keys()``.
        padded_size: Pair (height, width) that ``data_preprocessor.size`` pads to, or None.
        uneven: Whether ranks may have different numbers of samples; then the number is left out.
    """
    found: Dict[str, str] = {}
    _describe(batch, 'batch', padded_size, uneven, found)
    return found


def compare_batches(every: Sequence[Mapping[str, str]]) -> List[List[str]]:
    """Return the problems of each rank: where its batch differs from those of most. Pure.

    Where no value is the most frequent, that of the lowest rank is expected.
    """
    problems: List[List[str]] = [[] for _ in every]
    for name in dict.fromkeys(name for each in every for name in each):
        values = [each.get(name, 'missing') for each in every]
        expected = max(values, key=values.count)
        for rank, value in enumerate(values):
            if not _are_alike(value, expected):
                problems[rank].append(
                    f'{name} is {value}, expected {expected} as on rank '
                    f'{values.index(expected)}. Ranks must train on alike batches: look at this '
                    f"rank's data, pipeline and batch_size.")
    return problems


def _are_alike(one: str, other: str) -> bool:
    """Return whether two descriptions agree; of lists with several kinds, one kind must be in both.

    A dataset may mix kinds of samples, for example two data types, of which a batch need not have
    all.
    """
    (count, mark, kinds), (others, _, more) = one.partition(' x '), other.partition(' x ')
    return one == other or bool(
        mark and count == others and set(kinds.split(' / ')) & set(more.split(' / ')))


def _all_reduce(device: torch.device) -> Tuple[torch.Tensor, torch.Tensor]:
    tensor = _numbers(dist.get_rank()).to(device)
    dist.all_reduce(tensor)
    return tensor, torch.stack(_every()).sum(0)


def _broadcast(device: torch.device) -> Tuple[torch.Tensor, torch.Tensor]:
    last = dist.get_world_size() - 1
    tensor = _numbers(dist.get_rank()).to(device)
    dist.broadcast(tensor, src=last)
    return tensor, _numbers(last)


def _all_gather(device: torch.device) -> Tuple[torch.Tensor, torch.Tensor]:
    mine = _numbers(dist.get_rank()).to(device)
    outputs = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, mine)
    return torch.stack(outputs), torch.stack(_every())


# What DDP and MMEngine call on device tensors.
_COLLECTIVES: Dict[str, Callable[[torch.device], Tuple[torch.Tensor, torch.Tensor]]] = {
    'all_reduce': _all_reduce, 'broadcast': _broadcast, 'all_gather': _all_gather}


def _numbers(rank: int) -> torch.Tensor:
    return torch.arange(1, 6, dtype=torch.float32) * (rank + 1)


def _every() -> List[torch.Tensor]:
    return [_numbers(rank) for rank in range(dist.get_world_size())]


def _tensors(module: nn.Module) -> List[Tuple[str, str, torch.Tensor]]:
    return ([(name, 'parameter', tensor) for name, tensor in module.named_parameters()]
            + [(name, 'buffer', tensor) for name, tensor in module.named_buffers()])


def _is_on(found: torch.device, expected: torch.device) -> bool:
    return found == expected or (expected.index is None and found.type == expected.type)


def _shorten(problems: List[str], more: str) -> List[str]:
    if len(problems) <= _SHOWN:
        return problems
    return problems[:_SHOWN] + [f'{len(problems) - _SHOWN} {more}']


def _describe(item: Any, name: str, size: Optional[Sequence[int]], uneven: bool,
              found: Dict[str, str]) -> None:
    if isinstance(item, Mapping):
        for key in item:
            _describe(item[key], f'{name}.{key}', size, uneven, found)
    elif isinstance(item, torch.Tensor):
        shape: List[Any] = list(item.shape)
        if uneven:
            shape[:1] = ['N']
        found[name] = f"{item.dtype} of shape ({', '.join(map(str, shape))})"
    elif isinstance(item, (list, tuple)):
        kinds = sorted({_describe_sample(sample, size) for sample in item})
        found[name] = f"{'N' if uneven else len(item)} x {' / '.join(kinds)}"
    else:
        found[name] = type(item).__name__


def _describe_sample(sample: Any, size: Optional[Sequence[int]]) -> str:
    if isinstance(sample, torch.Tensor):
        shape: List[Any] = list(sample.shape)
        if len(shape) >= 2:
            if size is None:
                shape[-2:] = ['H', 'W']
            elif shape[-2] <= size[0] and shape[-1] <= size[1]:
                shape[-2:] = size
        return f"{sample.dtype} of shape ({', '.join(map(str, shape))})"
    if hasattr(sample, 'keys'):  # MMEngine's data elements
        fields = {key: getattr(sample, key, None) for key in sorted(sample.keys())}
        data: Dict[str, Any] = {
            key: getattr(value, 'data', value) for key, value in fields.items()}
        return f'{type(sample).__name__}(' + ', '.join(
            f'{key} {value.dtype}' if hasattr(value, 'dtype') else key
            for key, value in data.items()) + ')'
    return type(sample).__name__
