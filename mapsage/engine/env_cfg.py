"""Read ``env_cfg``: MMEngine's keys and ours, with a clear word for any other."""
from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Dict, Iterable, Mapping

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
        note: What was read other than written, for the log; empty when nothing was.
    """

    accelerator: str = 'auto'
    backend: str = 'auto'
    timeout: float = DEFAULT_TIMEOUT_SECONDS
    note: str = ''


def parse_env_cfg(env_cfg: Mapping[str, Any]) -> EnvCfg:
    """Check and read ``env_cfg``. Pure.

    MMSegmentation's default runtime names the backend ``nccl`` in every config. In a config that
    names no accelerator this counts as MMEngine's default, not as a choice, and reads as ``auto``.

    Raises:
        ConfigError: If a key is unknown or ``use_model_parallel`` is True.
    """
    _refuse_unknown('env_cfg', env_cfg, _KEYS)
    dist_cfg: Dict[str, Any] = dict(env_cfg.get('dist_cfg') or {})
    _refuse_unknown('env_cfg.dist_cfg', dist_cfg, _DIST_KEYS)
    if env_cfg.get('use_model_parallel'):
        raise ConfigError(
            'env_cfg.use_model_parallel=True is not supported in this version: expected None or '
            'False. Remove it to train data-parallel.')
    backend, note = dist_cfg.get('backend', 'auto'), ''
    if backend == 'nccl' and 'accelerator' not in env_cfg:
        backend = 'auto'
        note = ("env_cfg.dist_cfg.backend='nccl' is read as 'auto': the config names no "
                'accelerator. Set env_cfg.accelerator to make it a choice.')
    return EnvCfg(accelerator=env_cfg.get('accelerator') or 'auto', backend=backend,
                  timeout=dist_cfg.get('timeout', DEFAULT_TIMEOUT_SECONDS), note=note)


def _refuse_unknown(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, list(known), 1)
            raise ConfigError(
                f"{where} has an unknown key {key!r}: expected {', '.join(known)}."
                + (f' Did you mean {near[0]!r}?' if near else ''))
