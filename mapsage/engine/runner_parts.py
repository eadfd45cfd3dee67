"""Parts of a run that MapSageRunner makes otherwise than MMEngine's Runner.

They are MapSage's own default hooks, and the optimizers, which are fused where the device can. A
config replaces, changes or removes a default hook by its key in ``default_hooks``, as with
MMEngine's own.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple, Union

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mapsage.accelerator import Accelerator
from mapsage.distributed.wrappers.fused import watch_fused_steps, without_missing_fusion
from mapsage.host.runner import OptimWrappers
from mapsage_launcher.extras import default_hooks_of_extras, missing_extra

from .config_mistakes import check_clipping, optimizer_mistake
from .env_cfg import ConfigError

# Key in ``default_hooks`` -> class, in the order of registration. A value of None in the config
# leaves the hook out. Without the key, a hook of the same class in custom_hooks replaces it.
_HOOKS = dict(
    accelerator='AcceleratorHook',
    device_check='DeviceCheckHook',
    non_finite_loss='NonFiniteLossHook',
    preview='PreviewHook',
    reproducibility='ReproducibilityHook',
    progress_bar='ProgressBarHook',
    accumulated_gradients='AccumulatedGradientsHook',
    equal_buffers='EqualBuffersHook',
    stop='StopHook',
    slowest_rank='SlowestRankHook',
    report='RunReportHook',
    **default_hooks_of_extras(),
)

HookSetting = Union[Hook, Dict[str, Any], None]


def split_default_hooks(
    default_hooks: Optional[Mapping[str, HookSetting]],
) -> Tuple[Dict[str, HookSetting], Dict[str, HookSetting]]:
    """Divide ``default_hooks`` of a config into the entries for MMEngine and for MapSage.

    Returns:
        Entries that MMEngine registers, and entries with a key of MapSage.
    """
    settings = dict(default_hooks or {})
    return (
        {
            key: hook
            for key, hook in settings.items()
            # A hook of an extra that is not installed is left out anyway.
            if key not in _HOOKS
            and (hook is not None or missing_extra('names', f'default_hooks.{key}') is None)
        },
        {key: hook for key, hook in settings.items() if key in _HOOKS},
    )


def hooks_to_register(
    settings: Mapping[str, HookSetting], registered: List[Hook]
) -> Iterator[Union[Hook, Dict[str, Any]]]:
    """Yield MapSage's default hooks of a run, built or as configs, in the order of registration.

    Args:
        settings: Entries of ``default_hooks`` with a key of MapSage.
        registered: Hooks of the runner; the caller registers each hook before it asks for the next.
    """
    for key, name in _HOOKS.items():
        kind = HOOKS.get(name)
        hook: HookSetting = settings.get(key)
        if key not in settings and not any(isinstance(other, kind) for other in registered):
            hook = {}
        if isinstance(hook, dict):
            yield dict(dict(type=kind), **hook)
        elif hook is not None:
            yield hook


def build_optimizers(
    config: Any,
    build: Callable[[Any], OptimWrappers],
    accelerator: Accelerator,
    logger: logging.Logger,
) -> OptimWrappers:
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
