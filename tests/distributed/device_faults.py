"""Hooks that break rank 1 of a launched run, for test_faulty_ranks.py."""
from typing import Any

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

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        if get_rank() == 1 and runner.iter == 2:
            next(runner.model.parameters()).data.view(-1)[0] += 1e-3
