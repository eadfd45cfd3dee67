"""Optimizers as MMEngine builds them: fused where the device can, with readable config errors."""
from __future__ import annotations

import logging
from typing import Any, Callable

from mapsage.accelerator import Accelerator
from mapsage.host.runner import OptimWrappers
from mapsage.wrappers.fused import watch_fused_steps, without_missing_fusion

from .config_mistakes import check_clipping, optimizer_mistake
from .env_cfg import ConfigError


def build_optimizers(config: Any, build: Callable[[Any], OptimWrappers], accelerator: Accelerator,
                     logger: logging.Logger) -> OptimWrappers:
    """Build the optimizers of a run.

    Args:
        config: ``optim_wrapper`` of the config, or a built wrapper.
        build: MMEngine's ``build_optim_wrapper``.
        accelerator: Accelerator in force.
        logger: Logger for a warning about ``fused=True`` that the accelerator cannot obey.

    Raises:
        ConfigError: If no registry knows the optimizer, or the function that clips gradients does
            not take an argument of ``clip_grad``.
    """
    config, warnings = without_missing_fusion(config, accelerator)
    for warning in warnings:
        logger.warning(warning)
    try:
        optimizers = build(config)
    except (KeyError, TypeError, ValueError) as error:
        mistake = optimizer_mistake(config)
        if mistake is None:
            raise
        raise ConfigError(mistake) from error
    check_clipping(optimizers)
    return watch_fused_steps(optimizers)
