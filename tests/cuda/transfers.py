"""Counts the copies between the host and a card, also in a user's run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, List, Tuple

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch.utils._python_dispatch import TorchDispatchMode

from mapsage.host.runner import plain_model


class Transfers(TorchDispatchMode):
    """Lists the dtype of each copy from the host to a card, and whether the host waits for it.

    Attributes:
        copies: Dtype of each copy to a card, and whether the host waits.
        bytes_to_host: Bytes copied from cards to the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: List[Tuple[torch.dtype, bool]] = []
        self.bytes_to_host = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get('device')
        if (
            func is torch.ops.aten._to_copy.default
            and device is not None
            and torch.device(device).type == 'cuda'
            and args[0].is_cpu
        ):
            pinned = args[0].is_pinned() and kwargs.get('non_blocking', False)
            self.copies.append((args[0].dtype, not pinned))
        source, target = None, None
        if func is torch.ops.aten._to_copy.default and device is not None:
            source, target = args[0], torch.device(device)
        elif func is torch.ops.aten.copy_.default:
            source, target = args[1], args[0].device
        if source is not None and source.is_cuda and target is not None and target.type == 'cpu':
            self.bytes_to_host += source.numel() * source.element_size()
        return func(*args, **kwargs)


@HOOKS.register_module()
class TransfersOfBatches(Hook):
    """Writes the copies of the training's batches into the file that a variable names."""

    def before_train(self, runner: Any) -> None:
        preprocessor, transfers = plain_model(runner).data_preprocessor, Transfers()
        forward, self.dtypes = preprocessor.forward, []

        def counted(data: Any, training: bool = False) -> Any:
            if not training:
                return forward(data, training)
            with transfers:
                prepared = forward(data, training)
            self.dtypes += [
                str(sample.gt_sem_seg.data.dtype) for sample in prepared['data_samples']
            ]
            return prepared

        preprocessor.forward = counted
        self.transfers = transfers

    def after_train(self, runner: Any) -> None:
        Path(os.environ['MAPSAGE_TEST_TRANSFERS']).write_text(
            json.dumps(
                dict(
                    copies=[[str(dtype), waits] for dtype, waits in self.transfers.copies],
                    labels=self.dtypes,
                )
            )
        )
