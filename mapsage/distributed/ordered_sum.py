"""Sums over the virtual ranks whose bits depend on the number of virtual ranks alone.

Adding floats in another order gives other bits. Gloo's and NCCL's order depends on the number of
processes and on the place of an element in its bucket; here each element is added along the one
binary tree of :func:`~mapsage.distributed.virtual_ranks.split`, wherever it lies. Each process adds
up the subtrees that it holds whole, the parts of one chunk of the tensor meet on one process, which
adds them along the rest of the tree, and the sums of the chunks go to everybody.

All additions are carried out by the device that holds the tensors, since devices differ in what
they do with the smallest numbers, and in the dtype of the tensors.
"""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Dict, Generator, Iterator, List, Optional, Sequence, Set, Tuple

import numpy as np
import torch
import torch.distributed as dist

from mapsage.accelerator import Accelerator, current_accelerator

from .groups.process_group import uses_native_group
from .virtual_ranks import VirtualRanks, VirtualRanksError, split, subtrees

_HOST_BACKENDS = ('gloo', 'staged')
_TAG = 7301  # of messages between two processes, and upward one for each of their subtrees
Steps = Generator[None, None, torch.Tensor]


class Fold:
    """Adds up one process's tensors of virtual rank after virtual rank, as soon as it may.

    Not more than about log2 of the block's length sets of tensors are alive at any moment.

    Args:
        ranks: Virtual ranks of the run.
        block: Virtual ranks of this process.
    """

    def __init__(self, ranks: VirtualRanks, block: range) -> None:
        self._block, self._next = block, block.start
        self._subtrees = subtrees(ranks.count, block)
        self._sums = _Sums(ranks.count)

    def add(self, tensors: List[torch.Tensor]) -> None:
        """Add the tensors of the block's next virtual rank.

        Args:
            tensors: As many tensors, of the same shapes and dtypes, for each virtual rank. They
                belong to the fold from now on, which changes them in place.

        Raises:
            VirtualRanksError: If the tensors of the whole block have been added.
        """
        if self._next == self._block.stop:
            raise VirtualRanksError(
                f'the tensors of virtual rank(s) {list(self._block)} are all there: expected a '
                f'new Fold for the next sum.')
        self._sums.push(range(self._next, self._next + 1), tensors)
        self._next += 1

    def partials(self) -> List[List[torch.Tensor]]:
        """Return the sums over each of the block's subtrees, in the order of ``subtrees``.

        Raises:
            VirtualRanksError: If virtual ranks of the block are missing.
        """
        if self._next != self._block.stop:
            raise VirtualRanksError(
                f'virtual rank(s) {list(range(self._next, self._block.stop))} of the block '
                f'{list(self._block)} were not added: expected the tensors of each of them.')
        assert [ranks for ranks, _ in self._sums.parts] == self._subtrees
        return [tensors for _, tensors in self._sums.parts]


class OrderedSum:
    """The sum over all virtual ranks, in an order that depends on their number alone.

    With W processes, N bytes in a tensor and T subtrees in all blocks, a process with S of them
    sends ``(S + 1) * (W - 1) * N / W`` bytes and receives ``(T - S + W - 1) * N / W``. Where each
    block is one subtree (S is 1, T is W) both are a ring's ``2 * (W - 1) * N / W``. It keeps
    ``T / W * N`` bytes for each sum that is under way from one call to the next, because fresh
    memory costs as much time as the sum. Tensors of another device than the CPU need ``S * N`` more
    for the moment where S is not 1; where the process group does not carry them, all of these and
    ``2 * N`` are needed in host memory as well.

    Args:
        ranks: Virtual ranks of the run and their processes.
        rank: Rank of this process, from 0 to ``ranks.processes - 1``.
        group: Process group of these processes, in this order; all ranks when None.
    """

    def __init__(self, ranks: VirtualRanks, rank: int, group: Optional[Any] = None) -> None:
        self._ranks, self._rank, self._group = ranks, rank, group
        self._held = [subtrees(ranks.count, block) for block in ranks.blocks]
        self._own = self._held[rank]
        self._rooms: Dict[Tuple[torch.dtype, torch.device], List[torch.Tensor]] = {}

    def sum(self, partials: Sequence[torch.Tensor],
            out: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Return the sum over all virtual ranks, on every process. Collective.

        Args:
            partials: Sum over each subtree of this process's block, in the order of ``subtrees``.
                Flat tensors of one dtype, length and device; length and dtype are the same on all
                processes. They are not changed, unless one is ``out``.
            out: Contiguous tensor for the result, like each of ``partials``, which may be one of
                them. A new one when None.

        Returns:
            A tensor like each of ``partials``, with equal bits on all processes. With one process
            and no ``out`` it is the one partial sum itself.

        Raises:
            VirtualRanksError: If there is not one flat tensor for each subtree.
            RuntimeError: The backend's, if a process did not come. In a run it becomes a
                ``RankLostError`` that names the rank, see ``lost_ranks_named``.
        """
        self._check(partials)
        if self._ranks.processes > 1 and len(partials[0]):
            return _end(self._over_processes(partials, out, 1))
        with torch.no_grad():
            return partials[0] if out is None else out.copy_(partials[0])

    def mean(self, partials: Sequence[torch.Tensor],
             out: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Return the :meth:`sum` divided by the number of virtual ranks, in a tensor of its own.

        Collective; arguments and errors are those of :meth:`sum`.
        """
        return _end(self.mean_in_steps(partials, out))

    def mean_in_steps(self, partials: Sequence[torch.Tensor],
                      out: Optional[torch.Tensor] = None) -> Steps:
        """Return the :meth:`mean` as a generator, between whose steps data travels.

        Several may be under way. All processes must advance them in the same order. What it returns
        (``StopIteration.value``) is the mean; ``partials`` and ``out`` must be left alone until
        then. Errors are those of :meth:`sum`, and its argument is checked at the first step.
        """
        self._check(partials)
        count = self._ranks.count
        if self._ranks.processes > 1 and len(partials[0]):
            return (yield from self._over_processes(partials, out, count))
        with torch.no_grad():
            mean = partials[0] / count
            return mean if out is None else out.copy_(mean)

    def _over_processes(self, partials: Sequence[torch.Tensor], out: Optional[torch.Tensor],
                        divisor: int) -> Steps:
        # Detached, because a context without gradients would last beyond a step.
        partials = [each.detach().contiguous() for each in partials]
        result = torch.empty_like(partials[0]) if out is None else out.detach()
        world = self._ranks.processes
        ends = [len(partials[0]) * (each + 1) // world for each in range(world)]
        chunks = list(zip([0, *ends], ends))
        if partials[0].device.type == 'cpu':
            return self._between_hosts(partials, result, divisor, chunks)
        return self._by_collectives(partials, result, divisor, chunks)

    def _between_hosts(self, partials: Sequence[torch.Tensor], result: torch.Tensor,
                       divisor: int, chunks: List[Tuple[int, int]]) -> Steps:
        """Send the chunks from where they lie to where they belong, without further copies."""
        group: Any = self._group or dist.distributed_c10d._get_default_group()
        start, end = chunks[self._rank]
        # Behind this process first, so that not all of them begin with the same one.
        others = [*range(self._rank + 1, len(chunks)), *range(self._rank)]
        order = [ranks for held in self._held for ranks in held]
        with self._room(partials[0], len(order) * (end - start)) as room:
            parts = room.view(len(order), end - start)
            rows = iter(parts)
            coming = []
            for rank, held in enumerate(self._held):
                for tag, row in zip(range(len(held)), rows):
                    if rank == self._rank:
                        row.copy_(partials[tag][start:end])
                    elif end > start:
                        coming.append(group.recv([row], rank, _TAG + tag))
            # Where the result lies in a partial sum, each chunk of this is with the process that
            # sends the sum by the time the sum comes.
            sums = [group.recv([result[slice(*chunks[rank])]], rank, _TAG - 1)
                    for rank in others if len(range(*chunks[rank]))]
            sent = [group.send([each[slice(*chunks[rank])]], rank, _TAG + tag)
                    for rank in others if len(range(*chunks[rank]))
                    for tag, each in enumerate(partials)]
            yield
            _wait(coming)
            added = self._added(order, list(parts))
            mine = result[start:end]
            torch.div(added, divisor, out=mine) if divisor > 1 else mine.copy_(added)
            sent += [group.send([mine], rank, _TAG - 1) for rank in others if end > start]
            yield
            _wait(sums)
            _wait(sent)
        return result

    def _by_collectives(self, partials: Sequence[torch.Tensor], result: torch.Tensor,
                        divisor: int, chunks: List[Tuple[int, int]]) -> Steps:
        """Do the same with collectives, during which the device goes on computing."""
        first, world = partials[0], self._ranks.processes
        sizes = [end - start for start, end in chunks]
        mine, count = sizes[self._rank], len(self._own)
        order = [ranks for held in self._held for ranks in held]
        with self._room(first, len(order) * mine) as parts:
            # For each process its chunk of each partial sum.
            sent = first.contiguous() if count == 1 else torch.cat([
                part for parts in zip(*(each.split(sizes) for each in partials))
                for part in parts])
            coming = self._trade(parts, [len(held) * mine for held in self._held],
                                 sent, [count * size for size in sizes])
            yield
            _wait(coming)
            added = self._added(order, list(parts.view(len(order), mine)))
            if divisor > 1:
                added.div_(divisor)
            # By the same collective as before, which all backends have. The sum lies in the first
            # part, and there is room for a copy to each process.
            copies = parts[:world * mine]
            copies.view(world, mine)[1:] = added
            coming = self._trade(result, sizes, copies, [mine] * world)
            yield
            _wait(coming)
        return result

    def _added(self, order: List[range], parts: List[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the parts along the tree, in the memory of the first."""
        sums = _Sums(self._ranks.count)
        for ranks, part in zip(order, parts):
            sums.push(ranks, [part])
        [(_, [added])] = sums.parts
        return added

    def _trade(self, received: torch.Tensor, sizes: List[int], sent: torch.Tensor,
               sent_sizes: List[int]) -> List[Any]:
        """Send each process a part of a flat tensor, in order of ranks. Collective.

        Returns:
            The work to wait for before ``received`` is read. Through host memory there is none.
        """
        if carries(sent.device, self._group):
            return [dist.all_to_all_single(received, sent, sizes, sent_sizes, group=self._group,
                                           async_op=True)]
        on_host = received.device.type == 'cpu'
        host = received if on_host else torch.empty(len(received), dtype=received.dtype)
        width = sent.element_size()
        dist.all_to_all_single(as_bytes(host), as_bytes(to_host(sent)),
                               [size * width for size in sizes],
                               [size * width for size in sent_sizes], group=self._group)
        if not on_host:
            received.copy_(host)
        return []

    @contextmanager
    def _room(self, like: torch.Tensor, length: int) -> Iterator[torch.Tensor]:
        """Lend memory for ``length`` elements, the same again to later calls that fit into it.

        It is not given back after an error, when messages may still come into it.
        """
        free = self._rooms.setdefault((like.dtype, like.device), [])
        room = free.pop() if free else like.new_empty(0)
        if len(room) < length:
            room = like.new_empty(length)
        yield room[:length]
        free.append(room)

    def _check(self, partials: Sequence[torch.Tensor]) -> None:
        given = [tuple(partial.shape) for partial in partials]
        if len(given) != len(self._own) or len(set(given)) != 1 or len(given[0]) != 1:
            raise VirtualRanksError(
                f'partial sums of shapes {given}: expected {len(self._own)} flat tensor(s) of one '
                f'length, one for each of the virtual ranks '
                f"{', '.join(str(list(ranks)) for ranks in self._own)}.")


class _Sums:
    """Sums over neighboring subtrees, of which two halves of a node become one at once.

    Attributes:
        parts: Virtual ranks and sums, in order.
    """

    def __init__(self, count: int) -> None:
        self._nodes = _inner_nodes(count)
        self.parts: List[Tuple[range, List[torch.Tensor]]] = []

    def push(self, ranks: range, tensors: List[torch.Tensor]) -> None:
        """Append the sums over the subtree ``ranks``, next to the last one."""
        while self.parts and (self.parts[-1][0].start, ranks.start, ranks.stop) in self._nodes:
            before, sums = self.parts.pop()
            with torch.no_grad():
                for one, other in zip(sums, tensors):
                    one.add_(other)
            ranks, tensors = range(before.start, ranks.stop), sums
        self.parts.append((ranks, tensors))


def _end(steps: Steps) -> torch.Tensor:
    """Carry out all steps, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def _wait(works: List[Any]) -> None:
    for each in works:
        each.wait()


def _inner_nodes(count: int) -> Set[Tuple[int, int, int]]:
    """Return start, middle and stop of each inner node of the tree. Pure."""
    nodes, left = set(), [range(count)]
    while left:
        ranks = left.pop()
        if len(ranks) > 1:
            halves = split(ranks)
            nodes.add((ranks.start, halves[1].start, ranks.stop))
            left.extend(halves)
    return nodes


def resolve_reduction(reduction: Optional[str], accelerator: Accelerator,
                      group: Optional[Any] = None) -> str:
    """Return how the gradients of a process group are added up: ``'ordered'`` or ``'native'``.

    Args:
        reduction: Value of ``env_cfg.reduction``. None means ordered where gradients travel over
            gloo or through host memory, and native where the vendor's library adds them up on
            the devices.
        accelerator: Accelerator in use.
        group: Process group; that of all ranks when None.
    """
    if reduction is not None:
        return reduction
    native = uses_native_group(accelerator) or carries(torch.device(accelerator.device_type), group)
    return 'native' if native else 'ordered'


def carries(device: torch.device, group: Optional[Any] = None) -> bool:
    """Return whether a process group takes tensors of an accelerator without a copy to the host.

    False for the CPU, whose tensors travel as bytes because some versions of gloo lack bfloat16.

    Args:
        device: Device of the tensors.
        group: Process group; that of all ranks when None.
    """
    backends = dist.get_backend(group).split(',')
    own = [name.split(':')[1] for name in backends if name.split(':')[0] == device.type]
    # Without a colon it is the one backend for all devices.
    return device.type != 'cpu' and (own or backends)[0] not in _HOST_BACKENDS


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in host memory, itself if it is there."""
    if tensor.device.type != 'cpu':
        current_accelerator().flush()
    return tensor.cpu()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a flat host tensor, in the same memory."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)  # NumPy has no bfloat16
    return torch.from_numpy(tensor.numpy().view(np.uint8))
