"""Give encoder ranks the encoder of the ranks that train the head."""
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


def share_encoder(encoder: nn.Module, store: Any, rank: int, size: int, timeout: float) -> str:
    """Give every rank the parameters and buffers of rank 0. Collective over ``size`` ranks.

    However the weights got into the model (files, a checkpoint, random numbers), those that encode
    are those of the run, and no encoder needs the files.

    Args:
        encoder: The encoder, on any device. Rank 0's is read, the others' are overwritten.
        store: The rendezvous store, used by this thread alone.
        rank: 0 for the head's first rank, 1 and up for encoders.
        size: How many ranks take part.
        timeout: Seconds to wait for the others.

    Returns:
        A digest of the weights, equal on all ranks.

    Raises:
        WeightsDifferError: On every rank, if an encoder has other names, shapes or dtypes.
        RuntimeError: If a rank does not come.
    """
    group: Any = dist.ProcessGroupGloo(dist.PrefixStore('mapsage/encoder', store), rank, size,
                                       timedelta(seconds=timeout))
    state = {name: tensor for name, tensor in encoder.state_dict().items()
             if isinstance(tensor, torch.Tensor)}
    layout = repr([(name, tuple(each.shape), str(each.dtype)) for name, each in state.items()])
    every = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    group.allgather([every], [torch.tensor([zlib.crc32(layout.encode())])]).wait()
    odd = [number - 1 for number, each in enumerate(every) if not torch.equal(each, every[0])]
    if odd:
        raise WeightsDifferError(
            f'encoder(s) {odd} built another model.backbone than the head: names, shapes or dtypes '
            f'of its weights differ. Every rank must read the same config.')
    with torch.no_grad():
        for tensor in state.values():
            host = tensor.detach().to('cpu', copy=True).contiguous()
            flat = host.reshape(-1)
            # as bytes, since not every gloo knows bool and bfloat16, nor numpy the latter
            flat = flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat
            if flat.numel():
                options = dist.BroadcastOptions()
                options.rootRank = 0
                group.broadcast([torch.from_numpy(flat.numpy().view(np.uint8))], options).wait()
            if rank:
                tensor.copy_(host)
    return total_digest(weight_digests(encoder))
