"""``torch_gcu.distributed``: a world of its own next to ``torch.distributed``.

Traps: it is empty on a machine with CUDA; ``torch.distributed.is_initialized()`` knows nothing of
it; it has no object collectives; torch's ReduceOp and stores are not its own.
"""

import torch

if not torch.cuda.is_available():
    from .distributed_c10d import *  # noqa: F403

    def is_available() -> bool:
        return True
