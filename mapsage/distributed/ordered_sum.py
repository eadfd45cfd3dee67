"""Sums over virtual ranks with the same bits on any number of processes.

Floats added in another order give other bits. The order of gloo and NCCL depends on the number of
processes and on the position of an element in its bucket. Here every element is added along one
binary tree over the virtual ranks (``virtual_ranks.split``), in three steps:

1. Each process adds the subtrees that lie completely in its block of virtual ranks
   (:class:`Fold`). The results are its partial sums.
2. The tensor is cut into one chunk per process. Each process receives its chunk of all partial sums
   and adds them along the rest of the tree (:class:`OrderedSum`).
3. Each process sends the sum of its chunk to all others.

The additions run in the dtype of the tensors and on their device, because devices treat the
smallest (denormal) numbers differently.

Shapes, for W processes, T subtrees of all processes, S subtrees of this process, N elements:

    partials   S tensors of (N,)
    received   (T, n), n being the length of this process's chunk, about N / W
    result     (N,)
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Dict, Generator, Iterator, List, Optional, Sequence, Set, Tuple

import numpy as np
import torch
import torch.distributed as dist

from mapsage.accelerator import Accelerator, current_accelerator

from .groups.process_group import uses_native_group
from .virtual_ranks import VirtualRanks, VirtualRanksError, split, subtrees

_HOST_BACKENDS = ('gloo', 'staged')
# Tag of the messages with a process's first partial sum. The next partial sums have the next tags;
# the sum of a chunk has the tag below.
_TAG = 7301
_SUM_TAG = _TAG - 1
# A sum that pauses while its data travels, and returns the result.
Steps = Generator[None, None, torch.Tensor]


class Fold:
    """Adds the tensors of a process's virtual ranks along the tree, each as early as possible.

    So at most about log2(length of the block) sets of tensors are alive at any moment.

    Args:
        ranks: Virtual ranks of the run.
        block: Virtual ranks of this process.
    """

    def __init__(self, ranks: VirtualRanks, block: range) -> None:
        self._block, self._next = block, block.start
        self._subtrees = subtrees(ranks.count, block)
        self._sums = _SubtreeSums(ranks.count)

    def add(self, tensors: List[torch.Tensor]) -> None:
        """Add the tensors of the block's next virtual rank.

        Args:
            tensors: Tensors of the same number, shapes and dtypes for every virtual rank. The fold
                owns them from now on and changes them in place.

        Raises:
            VirtualRanksError: If the tensors of the whole block have already been added.
        """
        if self._next == self._block.stop:
            raise VirtualRanksError(
                f'the tensors of virtual rank(s) {list(self._block)} are all there: expected a '
                f'new Fold for the next sum.'
            )
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
                f'{list(self._block)} were not added: expected the tensors of each of them.'
            )
        assert [ranks for ranks, _ in self._sums.subtree_sums] == self._subtrees
        return [tensors for _, tensors in self._sums.subtree_sums]


class OrderedSum:
    """The sum over all virtual ranks, in an order that depends on their number only.

    Traffic: with W processes, a tensor of N bytes and T subtrees in all blocks, a process with S
    subtrees sends ``(S + 1) * (W - 1) * N / W`` bytes and receives ``(T - S + W - 1) * N / W``. If
    every block is one subtree (S is 1, T is W), both equal the ``2 * (W - 1) * N / W`` of a ring.

    Memory: a sum under way needs a buffer of ``T / W * N`` bytes, which is reused by later calls,
    because allocating it takes as long as the sum. Device tensors need ``S * N`` more during the
    call if S is not 1. If the process group does not carry device tensors, all of this and
    ``2 * N`` are needed in host memory too.

    Args:
        ranks: Virtual ranks of the run and their processes.
        rank: Rank of this process, from 0 to ``ranks.processes - 1``.
        group: Process group of these processes, in this order; all ranks when None.
    """

    def __init__(
        self, ranks: VirtualRanks, rank: int, group: Optional[dist.ProcessGroup] = None
    ) -> None:
        self._ranks, self._rank, self._group = ranks, rank, group
        self._subtrees_by_rank = [subtrees(ranks.count, block) for block in ranks.blocks]
        self._local_subtrees = self._subtrees_by_rank[rank]
        self._all_subtrees = [ranks for block in self._subtrees_by_rank for ranks in block]
        self._free_buffers: Dict[Tuple[torch.dtype, torch.device], List[torch.Tensor]] = {}

    def sum(
        self, partials: Sequence[torch.Tensor], out: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """Return the sum over all virtual ranks, on every process. Collective.

        Args:
            partials: Sum over each subtree of this process's block, in the order of ``subtrees``.
                Flat tensors, (N,), of one dtype, length and device; length and dtype are the same
                on all processes. They are not changed, unless one of them is ``out``.
            out: Contiguous tensor for the result, like a partial sum; it may be one of them. A new
                tensor when None.

        Returns:
            The sum, (N,), with equal bits on all processes. With a single process and no ``out``
            it is the only partial sum itself.

        Raises:
            VirtualRanksError: If the partial sums are not one flat tensor per subtree.
            RuntimeError: From the backend, if a process is missing. In a run it becomes a
                ``RankLostError`` that names the rank, see ``lost_ranks_named``.
        """
        self._check(partials)
        if self._ranks.processes > 1 and len(partials[0]):
            return _run(self._over_processes(partials, out, 1))
        with torch.no_grad():
            return partials[0] if out is None else out.copy_(partials[0])

    def mean(
        self, partials: Sequence[torch.Tensor], out: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """Return the :meth:`sum` divided by the number of virtual ranks. Collective.

        Arguments and errors are as for :meth:`sum`. Without ``out``, the result is a new tensor.
        """
        return _run(self.mean_in_steps(partials, out))

    def mean_in_steps(
        self, partials: Sequence[torch.Tensor], out: Optional[torch.Tensor] = None
    ) -> Steps:
        """Return a generator of the :meth:`mean`, which pauses while data travels.

        Several generators may be under way, and all processes must advance them in the same order.
        The generator returns the mean (``StopIteration.value``). Until then the caller must not
        touch ``partials`` and ``out``. Errors are as for :meth:`sum`; the first step checks the
        argument.
        """
        self._check(partials)
        count = self._ranks.count
        if self._ranks.processes > 1 and len(partials[0]):
            return (yield from self._over_processes(partials, out, count))
        with torch.no_grad():
            mean = partials[0] / count
            return mean if out is None else out.copy_(mean)

    def _over_processes(
        self, partials: Sequence[torch.Tensor], out: Optional[torch.Tensor], divisor: int
    ) -> Steps:
        # detach() instead of torch.no_grad(), which would stay active in the caller after a yield.
        partials = [partial.detach().contiguous() for partial in partials]
        result = torch.empty_like(partials[0]) if out is None else out.detach()
        world = self._ranks.processes
        ends = [len(partials[0]) * (rank + 1) // world for rank in range(world)]
        chunks = list(zip([0, *ends], ends))
        if partials[0].device.type == 'cpu':
            return self._between_hosts(partials, result, divisor, chunks)
        return self._by_collectives(partials, result, divisor, chunks)

    def _between_hosts(
        self,
        partials: Sequence[torch.Tensor],
        result: torch.Tensor,
        divisor: int,
        chunks: List[Tuple[int, int]],
    ) -> Steps:
        """Add CPU tensors with one message per chunk, straight from and into the tensors' memory.

        Args:
            partials: Partial sums of this process.
            result: Tensor for the result, which may be one of ``partials``.
            divisor: Number to divide the sum by.
            chunks: Start and end of every process's chunk.
        """
        group = self._group or dist.distributed_c10d._get_default_group()
        start, end = chunks[self._rank]
        # Start with the next rank, so that the processes do not all send to the same one first.
        peers = [*range(self._rank + 1, len(chunks)), *range(self._rank)]
        count = len(self._all_subtrees)
        with self._buffer(partials[0], count * (end - start)) as buffer:
            chunk_of_subtrees = buffer.view(count, end - start)
            rows = iter(chunk_of_subtrees)
            receiving = []
            for rank, rank_subtrees in enumerate(self._subtrees_by_rank):
                for tag, row in zip(range(len(rank_subtrees)), rows):
                    if rank == self._rank:
                        row.copy_(partials[tag][start:end])
                    elif end > start:
                        receiving.append(group.recv([row], rank, _TAG + tag))
            # The result may overwrite a partial sum that is being sent: a peer sends the sum of its
            # chunk only after it has received its chunk of all partial sums.
            receiving_sums = [
                group.recv([result[slice(*chunks[rank])]], rank, _SUM_TAG)
                for rank in peers
                if len(range(*chunks[rank]))
            ]
            sending = [
                group.send([partial[slice(*chunks[rank])]], rank, _TAG + tag)
                for rank in peers
                if len(range(*chunks[rank]))
                for tag, partial in enumerate(partials)
            ]
            yield
            _wait(receiving)
            total = self._add_subtrees(list(chunk_of_subtrees))
            local_sum = result[start:end]
            torch.div(total, divisor, out=local_sum) if divisor > 1 else local_sum.copy_(total)
            sending += [group.send([local_sum], rank, _SUM_TAG) for rank in peers if end > start]
            yield
            _wait(receiving_sums)
            _wait(sending)
        return result

    def _by_collectives(
        self,
        partials: Sequence[torch.Tensor],
        result: torch.Tensor,
        divisor: int,
        chunks: List[Tuple[int, int]],
    ) -> Steps:
        """Add device tensors with two all-to-all collectives; the device may compute meanwhile.

        Args:
            partials: Partial sums of this process.
            result: Tensor for the result, which may be one of ``partials``.
            divisor: Number to divide the sum by.
            chunks: Start and end of every process's chunk.
        """
        first, world = partials[0], self._ranks.processes
        sizes = [end - start for start, end in chunks]
        local_size, count = sizes[self._rank], len(self._local_subtrees)
        with self._buffer(first, len(self._all_subtrees) * local_size) as buffer:
            # All chunks for process 0, then all chunks for process 1, ...
            sent = (
                first.contiguous()
                if count == 1
                else torch.cat(
                    [
                        chunk
                        for chunks_of_rank in zip(*(partial.split(sizes) for partial in partials))
                        for chunk in chunks_of_rank
                    ]
                )
            )
            works = self._exchange(
                buffer,
                [len(block) * local_size for block in self._subtrees_by_rank],
                sent,
                [count * size for size in sizes],
            )
            yield
            _wait(works)
            total = self._add_subtrees(list(buffer.view(len(self._all_subtrees), local_size)))
            if divisor > 1:
                total.div_(divisor)
            # All-to-all again, because every backend has it. The sum is in the first row of the
            # buffer, which has at least as many rows as there are processes to send a copy to.
            copies = buffer[: world * local_size]
            copies.view(world, local_size)[1:] = total
            works = self._exchange(result, sizes, copies, [local_size] * world)
            yield
            _wait(works)
        return result

    def _add_subtrees(self, tensors: List[torch.Tensor]) -> torch.Tensor:
        """Return the sum of one tensor per subtree along the tree, in the memory of the first."""
        sums = _SubtreeSums(self._ranks.count)
        for ranks, tensor in zip(self._all_subtrees, tensors):
            sums.push(ranks, [tensor])
        [(_, [total])] = sums.subtree_sums
        return total

    def _exchange(
        self, received: torch.Tensor, sizes: List[int], sent: torch.Tensor, sent_sizes: List[int]
    ) -> List[dist.Work]:
        """Send each process a section of a flat tensor, in order of ranks. Collective.

        Returns:
            The work to wait for before ``received`` is read; empty if it is complete already.
        """
        if carries(sent.device, self._group, sent.dtype):
            return [
                dist.all_to_all_single(
                    received, sent, sizes, sent_sizes, group=self._group, async_op=True
                )
            ]
        on_host = received.device.type == 'cpu'
        host = received if on_host else torch.empty(len(received), dtype=received.dtype)
        width = sent.element_size()
        dist.all_to_all_single(
            as_bytes(host),
            as_bytes(to_host(sent)),
            [size * width for size in sizes],
            [size * width for size in sent_sizes],
            group=self._group,
        )
        if not on_host:
            received.copy_(host)
        return []

    @contextmanager
    def _buffer(self, like: torch.Tensor, length: int) -> Iterator[torch.Tensor]:
        """Lend a flat buffer of ``length`` elements, which later calls reuse.

        After an error the buffer is dropped, because messages may still arrive in it.
        """
        free = self._free_buffers.setdefault((like.dtype, like.device), [])
        buffer = free.pop() if free else like.new_empty(0)
        if len(buffer) < length:
            buffer = like.new_empty(length)
        yield buffer[:length]
        free.append(buffer)

    def _check(self, partials: Sequence[torch.Tensor]) -> None:
        shapes = [tuple(partial.shape) for partial in partials]
        expected = self._local_subtrees
        if len(shapes) != len(expected) or len(set(shapes)) != 1 or len(shapes[0]) != 1:
            raise VirtualRanksError(
                f'partial sums of shapes {shapes}: expected {len(expected)} flat tensor(s) of one '
                f'length, one for each of the virtual ranks '
                f'{", ".join(str(list(ranks)) for ranks in expected)}.'
            )


class _SubtreeSums:
    """A stack of sums over neighboring subtrees. Two halves of a node are added immediately.

    Attributes:
        subtree_sums: Virtual ranks and sums of the subtrees, in order.
    """

    def __init__(self, count: int) -> None:
        self._nodes = _inner_nodes(count)
        self.subtree_sums: List[Tuple[range, List[torch.Tensor]]] = []

    def push(self, ranks: range, tensors: List[torch.Tensor]) -> None:
        """Append the sums over the subtree ``ranks``, which follows the last subtree."""
        while self.subtree_sums and self._completes_node(ranks):
            left_ranks, left_tensors = self.subtree_sums.pop()
            with torch.no_grad():
                for left, right in zip(left_tensors, tensors):
                    left.add_(right)
            ranks, tensors = range(left_ranks.start, ranks.stop), left_tensors
        self.subtree_sums.append((ranks, tensors))

    def _completes_node(self, ranks: range) -> bool:
        """Return whether the last subtree and ``ranks`` are the two halves of a node."""
        last_ranks, _ = self.subtree_sums[-1]
        return (last_ranks.start, ranks.start, ranks.stop) in self._nodes


def _run(steps: Steps) -> torch.Tensor:
    """Run all steps, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def _wait(works: List[dist.Work]) -> None:
    for work in works:
        work.wait()


def _inner_nodes(count: int) -> Set[Tuple[int, int, int]]:
    """Return start, middle and stop of each inner node of the tree. Pure."""
    nodes, unvisited = set(), [range(count)]
    while unvisited:
        ranks = unvisited.pop()
        if len(ranks) > 1:
            halves = split(ranks)
            nodes.add((ranks.start, halves[1].start, ranks.stop))
            unvisited.extend(halves)
    return nodes


def resolve_reduction(
    reduction: Optional[str], accelerator: Accelerator, group: Optional[dist.ProcessGroup] = None
) -> str:
    """Return how the gradients of a process group are added: ``'ordered'`` or ``'native'``.

    Args:
        reduction: Value of ``env_cfg.reduction``. None chooses ordered if gradients travel over
            gloo or through host memory, and native if the vendor's library adds them on the
            devices.
        accelerator: Accelerator in use.
        group: Process group; the default group when None.
    """
    if reduction is not None:
        return reduction
    native = uses_native_group(accelerator) or carries(torch.device(accelerator.device_type), group)
    return 'native' if native else 'ordered'


def carries(
    device: torch.device,
    group: Optional[dist.ProcessGroup] = None,
    dtype: Optional[torch.dtype] = None,
) -> bool:
    """Return whether a process group takes tensors of an accelerator without a copy to the host.

    False for the CPU: its tensors travel as bytes, because some versions of gloo lack bfloat16.
    False also for 64-bit numbers if the accelerator's backend narrows or refuses them (eccl).

    Args:
        device: Device of the tensors.
        group: Process group; the default group when None.
        dtype: Data type of the tensors; None if it is not one of 64 bits.
    """
    if dtype in (torch.int64, torch.float64) and not current_accelerator().collectives_of_64_bits:
        return False
    # 'cpu:gloo,cuda:nccl', or a single name without a colon for all devices.
    backends = dist.get_backend(group).split(',')
    for_device = [name.split(':')[1] for name in backends if name.split(':')[0] == device.type]
    return device.type != 'cpu' and (for_device or backends)[0] not in _HOST_BACKENDS


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in host memory; the tensor itself if it is there already."""
    if tensor.device.type != 'cpu':
        current_accelerator().flush()
    return tensor.cpu()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a flat host tensor, in the same memory."""
    if tensor.dtype == torch.bfloat16:
        # NumPy has no bfloat16.
        tensor = tensor.view(torch.int16)
    return torch.from_numpy(tensor.numpy().view(np.uint8))
