"""Copies the encoder of the ranks that train the head to the encoder ranks.

Encoder ranks belong to no process group of the run, so the copy uses a separate gloo group.
"""

from __future__ import annotations

import zlib
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from mapsage.distributed import WeightsDifferError
from mapsage.distributed.weights import total_digest, weight_digests


def share_encoder(
    encoder: nn.Module, store: dist.Store, rank: int, size: int, timeout: float
) -> str:
    """Give every rank the parameters and buffers of rank 0. Collective over ``size`` ranks.

    All encoders thereby use the run's weights, from whatever source, and need no files.

    Args:
        encoder: Encoder on any device. It is read on rank 0 and overwritten on the other ranks.
        store: Rendezvous store. No other thread may use it during the call.
        rank: Number 0 for the head's first rank, 1 and up for encoders.
        size: Number of ranks that take part.
        timeout: Seconds to wait for the other ranks.

    Returns:
        Digest of the weights, equal on all ranks.

    Raises:
        WeightsDifferError: On every rank, if an encoder has other names, shapes or dtypes.
        RuntimeError: If a rank does not come.
    """
    group: Any = dist.ProcessGroupGloo(
        dist.PrefixStore('mapsage/encoder', store), rank, size, timedelta(seconds=timeout)
    )
    state = {
        name: tensor
        for name, tensor in encoder.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }
    layout = repr(
        [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in state.items()]
    )
    checksums = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    group.allgather([checksums], [torch.tensor([zlib.crc32(layout.encode())])]).wait()
    odd = [
        rank - 1
        for rank, checksum in enumerate(checksums)
        if not torch.equal(checksum, checksums[0])
    ]
    if odd:
        raise WeightsDifferError(
            f'encoder(s) {odd} built another model.backbone than the head: names, shapes or dtypes '
            f'of its weights differ. Every rank must read the same config.'
        )
    with torch.no_grad():
        for tensor in state.values():
            host = tensor.detach().to('cpu', copy=True).contiguous()
            flat = host.reshape(-1)
            # Send bytes, because some versions of gloo lack bool and bfloat16, and NumPy lacks
            # bfloat16.
            flat = flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat
            if flat.numel():
                options = dist.BroadcastOptions()
                options.rootRank = 0
                group.broadcast([torch.from_numpy(flat.numpy().view(np.uint8))], options).wait()
            if rank:
                tensor.copy_(host)
    return total_digest(weight_digests(encoder))
