"""Hooks of launched runs, most of which break rank 1."""

import json
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class BatchOfRank1(Hook):
    """Gives rank 1 a batch of another dtype."""

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if get_rank() == 1:
            data_batch['inputs'] = [image.float() for image in data_batch['inputs']]


@HOOKS.register_module()
class WeightOfRank1(Hook):
    """Changes one element of one parameter of rank 1 after the third iteration."""

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if get_rank() == 1 and runner.iter == 2:
            next(runner.model.parameters()).data.view(-1)[0] += 1e-3


@HOOKS.register_module()
class DriftOfRank1(Hook):
    """Multiplies the weights of rank 1 by ``1 + by`` after each iteration."""

    def __init__(self, by: float) -> None:
        self.by = by

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if get_rank() == 1:
            for parameter in runner.model.parameters():
                parameter.data.mul_(1 + self.by)


@HOOKS.register_module()
class MultiplyMatrices(Hook):
    """Multiplies two matrices on the device, and writes down on which."""

    def before_train(self, runner: Any) -> None:
        device = next(runner.model.parameters()).device
        ones = torch.ones(2, 2, device=device)
        if get_rank() == 0:
            path = Path(runner.work_dir) / 'product.json'
            path.write_text(json.dumps(str((ones @ ones).device)))


@HOOKS.register_module()
class FillCardOfRank1(Hook):
    """Asks for more memory than rank 1's device has, in the third iteration."""

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if get_rank() == 1 and runner.iter == 2:
            device = next(runner.model.parameters()).device
            torch.empty(2**40, dtype=torch.uint8, device=device)
