"""Train a MapSage config with Ray Train: Ray places the workers, restarts them and keeps the results.

python examples/ray_train.py CONFIG WORK_DIR [workers]      (pip install "ray[train]")
"""

import os
import sys
from typing import Dict

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(settings: Dict[str, str]) -> None:
    # Imported here, because Ray copies to its workers what the function names outside.
    from mmengine.config import Config
    from mmengine.registry import RUNNERS

    cfg = Config.fromfile(settings['config'])
    cfg.work_dir, cfg.launcher = settings['work_dir'], 'pytorch'
    # The first start finds no checkpoint; a restart continues from the newest.
    cfg.resume = True
    RUNNERS.build(cfg).train()


if __name__ == '__main__':
    config, work_dir, workers = [*sys.argv[1:], '2'][:3]
    TorchTrainer(
        train,
        train_loop_config=dict(config=os.path.abspath(config), work_dir=os.path.abspath(work_dir)),
        scaling_config=ScalingConfig(num_workers=int(workers), use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            storage_path=os.path.abspath(work_dir), failure_config=FailureConfig(max_failures=2)
        ),
    ).fit()
