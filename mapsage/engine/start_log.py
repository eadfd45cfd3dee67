"""Beginning of a run's log: device, ranks, warnings, and how the config differs from its bases."""
from __future__ import annotations

from typing import Iterable, Optional

import torch.distributed as dist
from mmengine.dist import is_main_process

from mapsage.accelerator import explain

from .config_report import config_report
from .run_extension import EngineRun


def log_start(run: EngineRun, determinism: Optional[str],
              warnings: Iterable[Optional[str]]) -> None:
    """Log the start of a run, after MMEngine's own report of the environment.

    Args:
        run: The run; its ranks have met.
        determinism: What the accelerator set for deterministic computation, if it set something.
        warnings: Warnings about the start; None and empty ones are left out.
    """
    backend = f', backend {dist.get_backend()}' if run.distributed else ''
    run.logger.info(f'{explain(run.accelerator, run.env.accelerator)}; '
                    f'world size {run.world_size}{backend}')
    if determinism:
        run.logger.info(determinism)
    for warning in warnings:
        if warning:
            run.logger.warning(warning)
    if is_main_process():
        run.logger.info(config_report(run.cfg))
