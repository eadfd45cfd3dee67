"""The channel of the sampling library where MapSage does not run the job.

It is the channel of MapSage's own runs (``mapsage/distributed/channels``), which `DynamicSamplingHook`
passes in. Only its secret comes from elsewhere: ranks that another engine started have none.
"""

from __future__ import annotations

import itertools
import os
from typing import Optional

import torch.distributed as dist

from mapsage.distributed import Channel
from mapsage_launcher.trust.job_secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE, new_secret

# Numbers of the channels, for their names; equal on all ranks.
_numbers = itertools.count()


def default_channel(
    group: Optional[dist.ProcessGroup] = None, timeout: Optional[float] = None
) -> Channel:
    """Return a new channel over a group; a :class:`SerialChannel` in one process. Collective.

    Without a secret of the job in the environment, the first rank to come puts one into the
    rendezvous store of torch.distributed, which this job trusts anyway. Ranks on several machines
    need ``MASTER_ADDR`` in the environment, which torchrun, accelerate, Slurm and Ray set, or
    ``GLOO_SOCKET_IFNAME``.

    Args:
        group: Process group of the ranks, of any backend; all ranks when None.
        timeout: Seconds a rank may be late; half an hour when None.

    Raises:
        ValueError: If ``timeout`` is not positive.
    """
    # Imported here, because importing the library shall load few modules.
    from mapsage.distributed import DEFAULT_TIMEOUT_SECONDS, open_channel
    from mapsage.distributed.store import store_lock

    if (
        dist.is_available()
        and dist.is_initialized()
        and not {SECRET_VARIABLE, SECRET_FILE_VARIABLE} & set(os.environ)
    ):
        store, key = dist.distributed_c10d._get_default_store(), 'mapsage/secret'
        with store_lock:
            if store.add(f'{key}/count', 1) == 1:
                store.set(key, new_secret())
            os.environ[SECRET_VARIABLE] = store.get(key).decode()
    seconds = float(DEFAULT_TIMEOUT_SECONDS) if timeout is None else timeout
    return open_channel(group, seconds, f'sampling/{next(_numbers)}')
