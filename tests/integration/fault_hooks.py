"""Hooks that break a run on one rank, for tests."""

import hashlib
import json
import os
import time
from pathlib import Path

import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, TASK_UTILS, TRANSFORMS


@TRANSFORMS.register_module()
class Careless:
    """A user's transform with a bug, which meets it in the third image."""

    def __call__(self, results: dict) -> dict:
        if results['img_path'].endswith('/3.png'):
            results['depth'] = results['gt_depth'] / 2
        return results


@HOOKS.register_module()
class RaiseOnRank1(Hook):
    """Raises in the third iteration, while rank 0 waits for gradients."""

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        if runner.iter == 2 and get_rank() == 1:
            raise KeyError('only rank 1 sees this')


@HOOKS.register_module()
class NonFiniteOnRank1(Hook):
    """Makes rank 1's input infinite in the third iteration."""

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        if runner.iter == 2 and get_rank() == 1:
            data_batch['inputs'] = [
                torch.full_like(image, float('inf'), dtype=torch.float32)
                for image in data_batch['inputs']
            ]


@HOOKS.register_module()
class StopBeforeIteration(Hook):
    """Announces that an iteration is reached and waits there to be killed.

    Args:
        iteration: Number of iterations that are done.
        variable: Environment variable without which a run continues; none with ''.
    """

    def __init__(self, iteration: int, variable: str = '') -> None:
        self.iteration, self.variable = iteration, variable

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        if runner.iter == self.iteration and (self.variable in os.environ or not self.variable):
            Path(os.environ['MAPSAGE_TEST_REACHED']).touch()
            time.sleep(600)


@HOOKS.register_module()
class PauseBeforeIteration(Hook):
    """Announces that an iteration is reached, and waits there until a file says to continue."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        if runner.iter == self.iteration and get_rank() == 0:
            Path(os.environ['MAPSAGE_TEST_REACHED']).touch()
            while not Path(os.environ['MAPSAGE_TEST_GO']).exists():
                time.sleep(0.01)


@HOOKS.register_module()
class ReportPlacement(Hook):
    """Writes after training on which devices the weights of each rank lie, and their digest."""

    def after_train(self, runner) -> None:
        state = runner.model.state_dict()
        digest = hashlib.sha256(b''.join(value.cpu().numpy().tobytes() for value in state.values()))
        path = Path(os.environ['MAPSAGE_TEST_PLACEMENT'], f'{get_rank()}.json')
        path.write_text(
            json.dumps(
                dict(
                    devices=sorted(
                        {str(parameter.device) for parameter in runner.model.parameters()}
                    ),
                    digest=digest.hexdigest(),
                )
            )
        )


@HOOKS.register_module()
class LateBufferOnRank1(Hook):
    """Registers a buffer on the CPU while the run is under way, as lazy caches do."""

    priority = 'HIGH'

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter == 2 and get_rank() == 1:
            runner.model.module.decode_head.register_buffer('cache', torch.zeros(4))


@TASK_UTILS.register_module()
class FailingScore:
    """Scores 1, and raises at the third batch of one rank."""

    def __init__(self, rank: int) -> None:
        self._rank, self._calls = rank, 0

    def __call__(self, samples):
        self._calls += 1
        if self._calls == 3 and get_rank() == self._rank:
            raise ZeroDivisionError(f'no pixels in tile {samples[0]["data_samples"].img_path}')
        return [1.0] * len(samples)
