"""Initial weights of a run, drawn on rank 0 and sent to the other ranks."""
from __future__ import annotations

from typing import Any

from mapsage.distributed import broadcast_tensors
from mapsage.host.runner import HostRunner, plain_model
from mapsage.wrappers.memory_layout import drawn_in_order


def initialize_weights(run: HostRunner) -> None:
    """Call the model's ``init_weights``, then send rank 0's weights over the device's backend.

    MMEngine would send one tensor at a time, and over gloo unless nccl is the only backend.
    Collective. A model without ``init_weights`` stays as it is.
    """
    model: Any = plain_model(run)
    if hasattr(model, 'init_weights'):
        with drawn_in_order(run.model):
            model.init_weights()
            broadcast_tensors(model.state_dict().values())
