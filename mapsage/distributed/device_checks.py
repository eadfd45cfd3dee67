"""Checks of devices, weights and batches before and while ranks train together.

Each check returns the problems of this rank, as texts with the value, the expectation and the next
step; an empty list means that it found none. Only :func:`check_own_cards` raises. The callers,
``DeviceCheckHook`` and the doctor, gather the problems of all ranks.

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
from .channels.open_channels import open_channel
from .groups.process_group import uses_native_group

SELF_TEST_SECONDS = 60.0
# Number of problems of one kind that are listed.
_SHOWN = 3


def check_device(accelerator: Accelerator, local_rank: int) -> List[str]:
    """Return problems with a small computation of known result on this rank's device."""
    try:
        device = accelerator.device(local_rank)
        # Whole numbers below 2**24 are exact in float32 on every device, and leave the random state
        # of the run unchanged.
        matrix = torch.arange(64, dtype=torch.float32).reshape(8, 8)
        product = (matrix.to(device) @ matrix.to(device)).cpu()
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        return [
            f'{accelerator.name} device of local rank {local_rank} cannot allocate and compute '
            f'({error_text(error)}). {_advice(error)}'
        ]
    if not torch.equal(product, matrix @ matrix):
        return [
            f'{device} computes wrong numbers: an 8x8 product of whole numbers is off by '
            f'{float((product - matrix @ matrix).abs().max()):g}, expected 0. Take this card '
            f'out of service.'
        ]
    return []


def _advice(error: BaseException) -> str:
    if WORKSPACE in str(error):
        return (
            f'The card is sound: this is the setting of cuBLAS for deterministic=True. Unset '
            f'{WORKSPACE}, which is {os.environ.get(WORKSPACE, "not set")!r} here, and MapSage '
            f'sets it, or set it to :4096:8.'
        )
    if 'out of memory' in str(error):
        return 'Free its memory, or take another card.'
    return 'Look at the card with the tool of its vendor, or take another one.'


def card_identity(accelerator: Accelerator, local_rank: int) -> Optional[str]:
    """Return a text that is equal for two ranks on the same card; None if they may share it.

    The text has the vendor's identifier of the card. If the vendor has none, it has the device
    masks and the index. Then ranks with different masks have different texts even on the same card,
    because the same index may mean different cards.
    """
    # Processes share a CPU, and under PJRT every process has its own client.
    if accelerator.device_type == 'cpu' or accelerator.name == 'xla':
        return None
    boot = Path('/proc/sys/kernel/random/boot_id')
    host = f'{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ""}'
    card = accelerator.card(local_rank)
    if card is not None:
        return f'{host} {card}'
    masks = [os.environ.get(name) for name in accelerator.masks]
    return f'{host} {masks} {accelerator.device(local_rank)}'


def check_own_cards(accelerator: Accelerator, local_rank: int) -> None:
    """Raise on every rank if two ranks use the same card. Collective.

    The ranks communicate through CPU tensors, because a vendor's collectives on a shared card may
    hang, or fail without a reason.

    Raises:
        AcceleratorError: Naming the ranks that share a card.
        RankLostError: Naming the missing ranks.
    """
    error: Optional[Exception] = None
    identity = ''
    try:
        identity = card_identity(accelerator, local_rank) or ''
    # The vendor's software may raise anything. The error is raised on every rank below.
    except Exception as raised:
        error = raised
    channel = open_channel()
    identities = channel.gather_texts('raised' if error else identity)
    if 'raised' in identities:
        raise_together(channel, error, "reading the card's name")
    shared = shared_cards([text or None for text in identities])
    if shared:
        pairs = '; '.join(
            f'rank {channel.ranks[position]} is on the card of rank(s) '
            f'{[channel.ranks[sharer] for sharer in sharers]}'
            for position, sharers in shared.items()
        )
        masks = ' and '.join(accelerator.masks) or 'the device masks'
        raise AcceleratorError(
            f'{pairs}. Every rank of a machine needs a different card: give each rank a different '
            f'LOCAL_RANK. If each rank sees one card only, set a different card in {masks}.'
        )


def shared_cards(identities: Sequence[Optional[str]]) -> Dict[int, List[int]]:
    """Return the ranks that share a card with another rank. Pure.

    Args:
        identities: Result of :func:`card_identity` on each rank.

    Returns:
        The ranks on the same card, by rank.
    """
    return {
        rank: [
            sharer
            for sharer, sharer_identity in enumerate(identities)
            if sharer_identity == identity and sharer != rank
        ]
        for rank, identity in enumerate(identities)
        if identity is not None and identities.count(identity) > 1
    }


def check_placement(module: nn.Module, devices: Sequence[torch.device]) -> List[str]:
    """Return a problem for every parameter and buffer on a device that is not in ``devices``."""
    stray = [
        (name, kind, tensor.device)
        for name, kind, tensor in _tensors(module)
        if not any(
            tensor.device == device or (device.index is None and tensor.device.type == device.type)
            for device in devices
        )
    ]
    expected = ' or '.join(map(str, devices))
    return _shorten(
        [
            f'{kind} {name!r} is on {device}, expected {expected}. Register it before the model is '
            f'wrapped, and create new tensors with device=some_parameter.device.'
            for name, kind, device in stray
        ],
        'more tensor(s) are elsewhere',
    )


def not_finite(module: nn.Module) -> Set[str]:
    """Return the names of parameters and running statistics with NaN or infinity."""
    return not_finite_tensors(
        (name, tensor)
        for name, kind, tensor in _tensors(module)
        if kind == 'parameter' or is_statistic(name)
    )


def is_statistic(name: str) -> bool:
    """Return whether a buffer holds the running statistics of a normalization layer.

    Other buffers may be infinite on purpose: a mask, the smallest value so far.
    """
    return name.rpartition('.')[2] in ('running_mean', 'running_var')


def not_finite_tensors(named: Iterable[Tuple[str, torch.Tensor]]) -> Set[str]:
    """Return the names of the floating-point tensors with NaN or infinity.

    This computes one sum per tensor and reads all sums of a device at once: a sum is finite only if
    all its terms are. Tensors of an XLA device are copied to the host, which is cheaper than
    compiling the sums.
    """
    sums: Dict[torch.device, List[Tuple[str, torch.Tensor, torch.Tensor]]] = {}
    for name, tensor in named:
        if tensor.is_floating_point():
            tensor = tensor.detach().cpu() if tensor.device.type == 'xla' else tensor
            # At least float32, because a float16 sum may overflow although its terms are finite.
            # Converted first: the kernel of a GCU refuses a sum in another type than its input's.
            wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
            total = wide.sum()
            sums.setdefault(tensor.device, []).append((name, tensor, total.float()))
    names: Set[str] = set()
    for entries in sums.values():
        sums_are_finite = torch.stack([total for _, _, total in entries]).isfinite().tolist()
        names.update(
            name
            for (name, tensor, _), is_finite in zip(entries, sums_are_finite)
            if not is_finite and not bool(tensor.detach().isfinite().all())
        )
    return names


def check_finite(module: nn.Module, known: Iterable[str] = ()) -> List[str]:
    """Return a problem for every name of :func:`not_finite` that is not in ``known``."""
    names = not_finite(module).difference(known)
    kinds = {name: kind for name, kind, _ in _tensors(module)}
    return _shorten(
        [
            f'{kinds[name]} {name!r} holds NaN or infinity, expected finite numbers. Lower the '
            f'learning rate or clip the gradients (optim_wrapper.clip_grad), and resume from a '
            f'checkpoint before this iteration.'
            for name in kinds
            if name in names
        ],
        'more tensor(s) are not finite',
    )


def check_collectives(
    accelerator: Accelerator, local_rank: int, timeout: float = SELF_TEST_SECONDS
) -> Dict[str, str]:
    """Run each collective that training needs on device tensors with a known result. Collective.

    The collectives run on a thread, so a collective that never returns is reported too; later ones
    are then not tried. Nothing is checked without a process group, or if gradients travel over a
    vendor's library outside torch.distributed.

    Args:
        accelerator: Accelerator in use.
        local_rank: Rank of this process on its node.
        timeout: Seconds the whole test may take.

    Returns:
        Problems by the name of the collective; empty if all results on this rank are right.
    """
    if not dist.is_available() or not dist.is_initialized() or uses_native_group(accelerator):
        return {}
    wrong: Dict[str, str] = {}
    running = [next(iter(_COLLECTIVES))]

    def run() -> None:
        # The current device is a property of the thread.
        accelerator.set_device(local_rank)
        device = accelerator.device(local_rank)
        for name, collective in _COLLECTIVES.items():
            running[0] = name
            try:
                result, expected = collective(device)
                accelerator.flush()
                if not torch.equal(result.cpu(), expected):
                    wrong[name] = (
                        f'{name} of {device.type} tensors over {dist.get_backend()} '
                        f'answers {result.cpu().tolist()}, expected '
                        f'{expected.tolist()}'
                    )
            # Handed to the calling thread, which reports it.
            except Exception as error:
                wrong[name] = (
                    f'{name} of {device.type} tensors over {dist.get_backend()} fails '
                    f'({error_text(error)})'
                )
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        name = running[0]
        return {**wrong, name: f'{name} over {dist.get_backend()} did not end within {timeout:g} s'}
    return wrong


def describe_batch(
    batch: Any, padded_size: Optional[Sequence[int]] = None, uneven: bool = False
) -> Dict[str, str]:
    """Return a text for each property of a collated batch that must be equal on all ranks.

    The properties are keys, dtypes, number of samples and shapes. The height and width of single
    samples may differ if the model's preprocessor pads them. Sizes up to ``padded_size`` count as
    that size; without a ``padded_size``, heights and widths are left out.

    Args:
        batch: Batch from MMEngine's collate: nested dicts and lists of tensors, and of elements
            that have ``keys()``.
        padded_size: Pair (height, width) that ``data_preprocessor.size`` pads to, or None.
        uneven: Whether ranks may have different numbers of samples; then the number is left out.
    """
    texts: Dict[str, str] = {}
    _add_descriptions(batch, 'batch', padded_size, uneven, texts)
    return texts


def compare_batches(batches: Sequence[Mapping[str, str]]) -> List[List[str]]:
    """Return the problems of each rank: the properties that differ from most ranks. Pure.

    If no value of a property is the most frequent, the value of the lowest rank is expected.

    Args:
        batches: Result of :func:`describe_batch` on each rank.
    """
    problems: List[List[str]] = [[] for _ in batches]
    for name in dict.fromkeys(name for batch in batches for name in batch):
        values = [batch.get(name, 'missing') for batch in batches]
        expected = max(values, key=values.count)
        for rank, value in enumerate(values):
            if not _are_alike(value, expected):
                problems[rank].append(
                    f'{name} is {value}, expected {expected} as on rank '
                    f'{values.index(expected)}. Ranks must train on alike batches: look at this '
                    f"rank's data, pipeline and batch_size."
                )
    return problems


def _are_alike(left: str, right: str) -> bool:
    """Return whether two descriptions agree.

    Lists of samples, such as '4 x a / b', agree if they have the same length and one kind in
    common: a dataset may mix kinds of samples, and a batch need not have all of them.
    """
    left_count, separator, left_kinds = left.partition(' x ')
    right_count, _, right_kinds = right.partition(' x ')
    return left == right or bool(
        separator
        and left_count == right_count
        and set(left_kinds.split(' / ')) & set(right_kinds.split(' / '))
    )


def _all_reduce(device: torch.device) -> Tuple[torch.Tensor, torch.Tensor]:
    tensor = _numbers(dist.get_rank()).to(device)
    dist.all_reduce(tensor)
    return tensor, torch.stack(_numbers_of_ranks()).sum(0)


def _broadcast(device: torch.device) -> Tuple[torch.Tensor, torch.Tensor]:
    last = dist.get_world_size() - 1
    tensor = _numbers(dist.get_rank()).to(device)
    dist.broadcast(tensor, src=last)
    return tensor, _numbers(last)


def _all_gather(device: torch.device) -> Tuple[torch.Tensor, torch.Tensor]:
    tensor = _numbers(dist.get_rank()).to(device)
    outputs = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, tensor)
    return torch.stack(outputs), torch.stack(_numbers_of_ranks())


# The collectives that DDP and MMEngine run on device tensors. Each function returns its result and
# the expected result, on the CPU.
_COLLECTIVES: Dict[str, Callable[[torch.device], Tuple[torch.Tensor, torch.Tensor]]] = {
    'all_reduce': _all_reduce,
    'broadcast': _broadcast,
    'all_gather': _all_gather,
}


def _numbers(rank: int) -> torch.Tensor:
    return torch.arange(1, 6, dtype=torch.float32) * (rank + 1)


def _numbers_of_ranks() -> List[torch.Tensor]:
    return [_numbers(rank) for rank in range(dist.get_world_size())]


def _tensors(module: nn.Module) -> List[Tuple[str, str, torch.Tensor]]:
    return [(name, 'parameter', tensor) for name, tensor in module.named_parameters()] + [
        (name, 'buffer', tensor) for name, tensor in module.named_buffers()
    ]


def _shorten(problems: List[str], more: str) -> List[str]:
    if len(problems) <= _SHOWN:
        return problems
    return problems[:_SHOWN] + [f'{len(problems) - _SHOWN} {more}']


def _add_descriptions(
    item: object, name: str, size: Optional[Sequence[int]], uneven: bool, texts: Dict[str, str]
) -> None:
    """Add the descriptions of an item of a batch, and of the items in it, to ``texts``."""
    if isinstance(item, Mapping):
        for key in item:
            _add_descriptions(item[key], f'{name}.{key}', size, uneven, texts)
    elif isinstance(item, torch.Tensor):
        shape = list(map(str, item.shape))
        if uneven:
            shape[:1] = ['N']
        texts[name] = f'{item.dtype} of shape ({", ".join(shape)})'
    elif isinstance(item, (list, tuple)):
        kinds = sorted({_describe_sample(sample, size) for sample in item})
        texts[name] = f'{"N" if uneven else len(item)} x {" / ".join(kinds)}'
    else:
        texts[name] = type(item).__name__


def _describe_sample(sample: object, size: Optional[Sequence[int]]) -> str:
    if isinstance(sample, torch.Tensor):
        shape = list(map(str, sample.shape))
        if len(shape) >= 2:
            if size is None:
                shape[-2:] = ['H', 'W']
            elif sample.shape[-2] <= size[0] and sample.shape[-1] <= size[1]:
                shape[-2:] = map(str, size)
        return f'{sample.dtype} of shape ({", ".join(shape)})'
    # A data element of MMEngine. Elements in it, such as PixelData, have their tensor in `data`.
    if hasattr(sample, 'keys'):
        fields = {key: getattr(sample, key, None) for key in sorted(sample.keys())}
        data: Dict[str, object] = {
            key: getattr(value, 'data', value) for key, value in fields.items()
        }
        return (
            f'{type(sample).__name__}('
            + ', '.join(
                f'{key} {value.dtype}' if hasattr(value, 'dtype') else key
                for key, value in data.items()
            )
            + ')'
        )
    return type(sample).__name__
