"""The channel of the sampling library where MapSage does not run the job: a gloo group.

Every rank sends its rows directly to every other rank. So each rank sees for itself which ranks did
not answer, and the error names them. MapSage's own channel (``mapsage/distributed/channels``) needs
fewer messages and is what `DynamicSamplingHook` passes in.
"""

from __future__ import annotations

from datetime import timedelta
from typing import List, Optional, Sequence

import torch
import torch.distributed as dist

from mapsage.base.errors import UserError
from mapsage.distributed import Channel, RankLostError, SerialChannel

# Seconds that a rank may be late, as in MapSage's runs.
DEFAULT_TIMEOUT_SECONDS = 1800.0


class GlooGroupError(UserError, ValueError):
    """A process group cannot carry the sampling library's messages."""

    on_every_rank = True


def default_channel(
    group: Optional[dist.ProcessGroup] = None, timeout: Optional[float] = None
) -> Channel:
    """Return a channel over gloo; a :class:`SerialChannel` in a single process. Collective.

    Args:
        group: Process group of the ranks, whatever its backend if it has all ranks; all ranks when
            None. A group of some ranks must be a gloo group, which no other thread uses.
        timeout: Seconds a rank may be late; half an hour when None.

    Raises:
        GlooGroupError: If the group has some ranks only and takes no CPU tensors.
        ValueError: If ``timeout`` is not positive.
    """
    if timeout is not None and not timeout > 0:
        raise ValueError(f'timeout={timeout!r}, expected a positive number of seconds or None.')
    if not dist.is_available() or not dist.is_initialized():
        return SerialChannel()
    if dist.get_world_size(group) == 1:
        return SerialChannel(dist.get_rank())
    seconds = timeout or DEFAULT_TIMEOUT_SECONDS
    if group is None or dist.get_world_size(group) == dist.get_world_size():
        # A group of its own, so that messages of other users cannot come between.
        group = dist.new_group(backend='gloo', timeout=timedelta(seconds=seconds))
    elif 'gloo' not in str(dist.get_backend(group)):
        raise GlooGroupError(
            f'group has backend {dist.get_backend(group)!r} and {dist.get_world_size(group)} of '
            f'{dist.get_world_size()} ranks: expected a gloo group. Make one on all ranks with '
            f"dist.new_group(ranks, backend='gloo')."
        )
    return GlooChannel(group, seconds)


class GlooChannel(Channel):
    """Small collectives of CPU tensors over a gloo group. Use :func:`default_channel`.

    Args:
        group: Gloo group that nobody else uses.
        timeout: Seconds a rank may be late.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        # torch 1.10 has no get_process_group_ranks, and all versions have this table.
        positions = dist.distributed_c10d._pg_group_ranks[group]
        super().__init__(sorted(positions, key=lambda rank: positions[rank]), dist.get_rank())
        self._group, self.timeout = group, timeout
        self._position = self.ranks.index(self.rank)
        self._lost: List[int] = []

    def max(self, tensor: torch.Tensor, timeout: Optional[float] = None) -> None:
        """Replace a tensor by its maximum over the ranks, see :meth:`Channel.max`."""
        tensor.copy_(torch.stack(self._gather(tensor, timeout)).max(0)[0])

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite a tensor with the tensor of rank ``source``, see :meth:`Channel.broadcast`."""
        tensor.detach().copy_(self.gather(tensor)[self.ranks.index(source)])

    def gather(self, tensor: torch.Tensor) -> List[torch.Tensor]:
        """Return every rank's tensor, see :meth:`Channel.gather`."""
        return self._gather(tensor, None)

    def trade(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send each rank its row of a small tensor, see :meth:`Channel.trade`."""
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._swap(list(tensor.contiguous()), list(received), None)
        return received

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: List[int],
        input_sizes: List[int],
    ) -> None:
        """Send each rank its rows of a tensor, see :meth:`Channel.all_to_all`."""
        received = output.detach().contiguous()
        self._swap(tensor.contiguous().split(input_sizes), received.split(output_sizes), None)
        if not output.is_contiguous():
            output.detach().copy_(received)

    def publish(self, key: str, text: str) -> bool:
        """Return False: no rank of a gloo group reads what another one published."""
        return False

    def published(self, key: str) -> Optional[str]:
        """Return None, because nothing is published."""
        return None

    def _gather(self, tensor: torch.Tensor, timeout: Optional[float]) -> List[torch.Tensor]:
        local = tensor.detach().contiguous()
        received = [torch.empty_like(local) for _ in self.ranks]
        self._swap([local] * len(self.ranks), received, timeout)
        return received

    def _swap(
        self,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        timeout: Optional[float],
    ) -> None:
        """Send a tensor to every rank and receive one from every rank; skip empty tensors.

        Raises:
            RankLostError: Naming the ranks whose tensor did not come.
        """
        if self._lost:
            raise RankLostError(self._describe('this channel has ended:'), self._lost)
        received[self._position].copy_(sent[self._position])
        peers = [position for position in range(len(self.ranks)) if position != self._position]
        seconds = self.timeout if timeout is None else min(timeout, self.timeout)
        lost = {}
        try:
            works = [
                (position, work([tensors[position]], position, 0))
                for tensors, work in ((received, self._group.recv), (sent, self._group.send))
                for position in peers
                if tensors[position].numel()
            ]
        # A connection that broke in an earlier collective. Who is lost is not known any more.
        except RuntimeError as error:
            raise RankLostError(
                f'rank {self.rank} cannot reach the other ranks: one of them has '
                f'ended or has given up waiting ({_first_line(error)}). Look at '
                f'their logs first.'
            ) from error
        for position, pending in works:
            try:
                pending.wait(timedelta(seconds=seconds))
            except RuntimeError as error:
                # After the first deadline gloo ends everything that has not arrived.
                lost[self.ranks[position]] = error
        if lost:
            self._lost = sorted(lost)
            symptom = next(iter(lost.values()))
            raise RankLostError(
                self._describe(f'rank {self.rank} waited at most {seconds:g} s, and')
                + f' ({_first_line(symptom)})',
                self._lost,
            ) from symptom

    def _describe(self, event: str) -> str:
        return (
            f'{event} rank(s) {self._lost} did not come: they have ended, are late, or run '
            f'other code. Look at their logs first.'
        )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [''])[0][:200]
