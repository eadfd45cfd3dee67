"""Hooks that MapSageRunner registers in addition to MMEngine's default hooks.

A config replaces, changes or removes one by its key in ``default_hooks``, as with MMEngine's own.
"""
from __future__ import annotations

from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple, Union

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

# Key in ``default_hooks`` -> class, in the order of registration. A value of None in the config
# leaves the hook out. Without the key, a hook of the same class in custom_hooks replaces it.
_HOOKS = dict(accelerator='AcceleratorHook', device_check='DeviceCheckHook',
              non_finite_loss='NonFiniteLossHook', preview='PreviewHook',
              reproducibility='ReproducibilityHook', progress_bar='ProgressBarHook',
              accumulated_gradients='AccumulatedGradientsHook', equal_buffers='EqualBuffersHook',
              stop='StopHook', nodes='NodesHook', slowest_rank='SlowestRankHook',
              report='RunReportHook')

HookSetting = Union[Hook, Dict[str, Any], None]


def split_default_hooks(default_hooks: Optional[Mapping[str, HookSetting]]
                        ) -> Tuple[Dict[str, HookSetting], Dict[str, HookSetting]]:
    """Divide ``default_hooks`` of a config into the entries for MMEngine and for MapSage.

    Returns:
        Entries that MMEngine registers, and entries with a key of MapSage.
    """
    settings = dict(default_hooks or {})
    return ({key: hook for key, hook in settings.items() if key not in _HOOKS},
            {key: hook for key, hook in settings.items() if key in _HOOKS})


def hooks_to_register(settings: Mapping[str, HookSetting], registered: List[Hook]
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
