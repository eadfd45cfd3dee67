"""Read ``env_cfg``, which has keys of MMEngine and of MapSage; any other key is an error."""
from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Dict, Iterable, Mapping, Optional

from mapsage.distributed import DEFAULT_TIMEOUT_SECONDS

_KEYS = ('cudnn_benchmark', 'mp_cfg', 'dist_cfg', 'resource_limit',  # MMEngine's
         'accelerator', 'use_model_parallel')  # MapSage's
_DIST_KEYS = ('backend', 'timeout')


class ConfigError(ValueError):
    """A config asks for something that MapSage cannot do."""


@dataclass(frozen=True)
class EnvCfg:
    """The part of ``env_cfg`` that MapSage uses.

    Attributes:
        accelerator: Name of an accelerator, or ``'auto'``.
        backend: Name of a communication backend, or ``'auto'``.
        timeout: Seconds that a collective may wait.
        use_model_parallel: Whether model parallelism is required (True) or forbidden (False); it is
            an error if that is impossible. None lets MapSage decide.
        note: Line for the log about a value that was not taken literally; empty if there is none.
    """

    accelerator: str = 'auto'
    backend: str = 'auto'
    timeout: float = DEFAULT_TIMEOUT_SECONDS
    use_model_parallel: Optional[bool] = None
    note: str = ''


def parse_env_cfg(env_cfg: Mapping[str, Any],
                  model_wrapper_cfg: Optional[Mapping[str, Any]] = None) -> EnvCfg:
    """Check and read ``env_cfg``. Pure.

    A ``model_wrapper_cfg`` of type ``MMModelParallel`` means ``use_model_parallel=True``.

    MMSegmentation's default runtime names the backend ``nccl`` in every config. In a config that
    names no accelerator, this counts as MMEngine's default and not as a choice, and is read as
    ``auto``.

    Args:
        env_cfg: Value of ``env_cfg`` in the config.
        model_wrapper_cfg: Value of ``model_wrapper_cfg`` in the config, if it has one.

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
    # Compared with `is`, since 1 == True and the 1 of a config more likely means a number of
    # devices.
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
