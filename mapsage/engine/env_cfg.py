"""Read ``env_cfg``: MMEngine's keys and MapSage's; any other key is an error that names it."""
from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Dict, Iterable, Mapping, Optional

from mapsage.distributed import DEFAULT_TIMEOUT_SECONDS

_KEYS = ('cudnn_benchmark', 'mp_cfg', 'dist_cfg', 'resource_limit',  # MMEngine's
         'accelerator', 'use_model_parallel')  # ours
_DIST_KEYS = ('backend', 'timeout')


class ConfigError(ValueError):
    """A config says something MapSage cannot do."""


@dataclass(frozen=True)
class EnvCfg:
    """The part of ``env_cfg`` that MapSage acts on.

    Attributes:
        accelerator: ``'auto'`` or an accelerator's name.
        backend: ``'auto'`` or a communication backend.
        timeout: Seconds a collective may wait.
        use_model_parallel: True or False: obey or fail; None: decide.
        note: Line for the log about a value that was not taken literally; empty without one.
    """

    accelerator: str = 'auto'
    backend: str = 'auto'
    timeout: float = DEFAULT_TIMEOUT_SECONDS
    use_model_parallel: Optional[bool] = None
    note: str = ''


def parse_env_cfg(env_cfg: Mapping[str, Any],
                  model_wrapper_cfg: Optional[Mapping[str, Any]] = None) -> EnvCfg:
    """Check and read ``env_cfg``. Pure.

    A ``model_wrapper_cfg`` of type ``MMModelParallel`` says ``use_model_parallel=True``.

    MMSegmentation's default runtime names the backend ``nccl`` in every config. In a config that
    names no accelerator this counts as MMEngine's default, not as a choice, and reads as ``auto``.

    Raises:
        ConfigError: If a key is unknown, ``use_model_parallel`` is not True, False or None, or
            the wrapper contradicts it.
    """
    _refuse_unknown('env_cfg', env_cfg, _KEYS)
    dist_cfg: Dict[str, Any] = dict(env_cfg.get('dist_cfg') or {})
    _refuse_unknown('env_cfg.dist_cfg', dist_cfg, _DIST_KEYS)
    use_model_parallel = _use_model_parallel(env_cfg.get('use_model_parallel'),
                                             (model_wrapper_cfg or {}).get('type'))
    backend, note = dist_cfg.get('backend', 'auto'), ''
    if backend == 'nccl' and 'accelerator' not in env_cfg:
        backend = 'auto'
        note = ("env_cfg.dist_cfg.backend='nccl' is read as 'auto': the config names no "
                'accelerator. Set env_cfg.accelerator to make it a choice.')
    return EnvCfg(accelerator=env_cfg.get('accelerator') or 'auto', backend=backend,
                  timeout=dist_cfg.get('timeout', DEFAULT_TIMEOUT_SECONDS),
                  use_model_parallel=use_model_parallel, note=note)


def names_model_parallel(wrapper_type: Any) -> bool:
    """Return whether the ``type`` of a ``model_wrapper_cfg``, name or class, is MMModelParallel."""
    name = wrapper_type if isinstance(wrapper_type, str) else getattr(wrapper_type, '__name__', '')
    return name.rsplit('.', 1)[-1] == 'MMModelParallel'


def _use_model_parallel(value: Any, wrapper_type: Any) -> Optional[bool]:
    # `is`, since 1 == True and a config's 1 is more likely a number of devices
    if not (value is None or value is True or value is False):
        raise ConfigError(
            f'env_cfg.use_model_parallel must be True, False or None, got {value!r}. None lets '
            f'MapSage decide.')
    if not names_model_parallel(wrapper_type):
        return value
    if value is False:
        raise ConfigError(
            "env_cfg.use_model_parallel=False contradicts model_wrapper_cfg.type='MMModelParallel'."
            ' Remove one of them.')
    return True


def _refuse_unknown(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, list(known), 1)
            raise ConfigError(
                f"{where} has an unknown key {key!r}: expected {', '.join(known)}."
                + (f' Did you mean {near[0]!r}?' if near else ''))
