"""The config's ``env_cfg``, checked and read into :class:`EnvCfg`.

``env_cfg`` has keys of MMEngine and of MapSage. MMEngine ignores a key that it does not know; here
it is an error, because a typo would silently train on the wrong device. MMEngine reads its own keys
itself, so most of them are only admitted here.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from typing import Any, Callable, Dict, Iterable, Mapping, Optional

from mapsage.base.errors import UserError
from mapsage.distributed import DEFAULT_TIMEOUT_SECONDS

# Keys of MMEngine, then of MapSage.
_KEYS = (
    'cudnn_benchmark',
    'mp_cfg',
    'dist_cfg',
    'resource_limit',
    'accelerator',
    'use_model_parallel',
    'virtual_ranks',
    'reduction',
    'cross_check',
    'fast',
    'channels_last',
    'float32_matmul_precision',
    'cudnn_allow_tf32',
    'accept_other_data',
)
_DIST_KEYS = ('backend', 'timeout', 'port', 'init_backend', 'heartbeat_timeout')
DEFAULT_HEARTBEAT_SECONDS = 15.0


class ConfigError(UserError, ValueError):
    """A config asks for something that MapSage cannot do."""

    on_every_rank = True


def _setting(
    default: Any,
    key: str,
    expected: str,
    allowed: Callable[[Any], bool],
    convert: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Return a field that checks and converts its value; None, for the default, is not checked.

    Args:
        default: Value in place of None.
        key: Key of the field in ``env_cfg``.
        expected: Description of the allowed values.
        allowed: Function that returns whether a value is allowed.
        convert: Function that converts an allowed value.
    """
    return field(
        default=default,
        metadata=dict(key=key, expected=expected, allowed=allowed, convert=convert),
    )


def _is_flag(value: object) -> bool:
    # Compared with `is`, because 1 == True, and a 1 in a config more likely means a number of
    # devices.
    return value is True or value is False


def _is_one_of(*values: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and value in values


def _is_number(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


@dataclass(frozen=True)
class EnvCfg:
    """The part of ``env_cfg`` that MapSage uses.

    Attributes:
        accelerator: Name of an accelerator, or ``'auto'``.
        backend: Name of a communication backend, or ``'auto'``.
        timeout: Seconds that a collective may wait.
        use_model_parallel: Whether model parallelism is required (True) or forbidden (False); an
            error if that is impossible. None lets MapSage decide.
        note: Warning about a value that was not taken literally; empty without one.
        port: Port at which the ranks of Slurm and MPI meet, as under MMEngine. None uses the
            environment's MASTER_PORT. torchrun chooses the port of its ranks itself.
        virtual_ranks: Number of virtual ranks of the run. None uses the checkpoint's number, or
            at the first start the number of processes.
        reduction: Way to add up gradients: ``'ordered'``, along a fixed tree over the virtual
            ranks, or ``'native'``, as the backend does. None chooses by the backend, see
            :func:`mapsage.distributed.resolve_reduction`.
        heartbeat_timeout: Seconds without a sign after which a node is lost; 0 for no heartbeat
            between nodes.
        cross_check_interval: Number of iterations between two checks of gradients by another rank,
            ``cross_check=dict(interval=...)``; None for no checks.
        fast: Whether a card gets the fast settings of ``extensions/fast.py``. None means yes, but
            a resumed run keeps what it began with.
        channels_last: Whether convolutions store the channels last in memory; None for what
            ``fast`` chooses.
        float32_matmul_precision: Precision of float32 matrix products on cuda: ``'highest'``,
            ``'high'`` (TF32) or ``'medium'`` (bfloat16); None for PyTorch's default, highest.
        cudnn_allow_tf32: Whether float32 convolutions on cuda may use TF32; None for PyTorch's
            default, True.
        accept_other_data: Whether a run may be resumed although the number or the order of its
            training samples, or its classes, differ from the checkpoint's.
    """

    accelerator: str = 'auto'
    backend: str = 'auto'
    timeout: float = DEFAULT_TIMEOUT_SECONDS
    use_model_parallel: Optional[bool] = None
    note: str = ''
    port: Optional[int] = _setting(
        None,
        'dist_cfg.port',
        'a TCP port, 1 to 65535.',
        lambda port: port is not True and str(port).isdigit() and 0 < int(str(port)) < 2**16,
        int,
    )
    virtual_ranks: Optional[int] = _setting(
        None,
        'virtual_ranks',
        'a whole number from 1 on, the number of '
        'virtual ranks for the whole life of the run, or None for the number in the '
        'checkpoint, at the first start the number of processes.',
        lambda count: _is_number(count, int) and count >= 1,
    )
    reduction: Optional[str] = _setting(
        None,
        'reduction',
        "'ordered' (gradients are added in an order "
        "that depends only on the virtual ranks), 'native' (as the backend adds them), or "
        'None for what suits the backend.',
        _is_one_of('ordered', 'native'),
    )
    heartbeat_timeout: float = _setting(
        DEFAULT_HEARTBEAT_SECONDS,
        'dist_cfg.heartbeat_timeout',
        'seconds, at '
        'least 1, after which a machine that gives no sign is lost, or 0 for no '
        'heartbeat.',
        lambda wait: _is_number(wait, int, float) and (wait == 0 or 1 <= wait < 10**6),
        float,
    )
    fast: Optional[bool] = _setting(
        None,
        'fast',
        'True (fast settings on a card) or False (those of the host); None for True, except that '
        'a resumed run keeps what it began with.',
        _is_flag,
    )
    channels_last: Optional[bool] = _setting(
        None,
        'channels_last',
        'True (convolutions keep the channels last '
        'in memory) or False (first, as torch does by default); None for what fast chooses.',
        _is_flag,
    )
    # The values of torch.set_float32_matmul_precision.
    float32_matmul_precision: Optional[str] = _setting(
        None,
        'float32_matmul_precision',
        "'highest' (float32), 'high' (TF32), 'medium' (bfloat16), or None for PyTorch's default.",
        _is_one_of('highest', 'high', 'medium'),
    )
    cudnn_allow_tf32: Optional[bool] = _setting(
        None,
        'cudnn_allow_tf32',
        'True (float32 convolutions may use '
        "TF32), False (they may not), or None for PyTorch's default.",
        _is_flag,
    )
    cross_check_interval: Optional[int] = None
    accept_other_data: bool = _setting(
        False,
        'accept_other_data',
        'True (a run is resumed although its '
        'samples or classes differ from those of the checkpoint) or False (that is an error).',
        _is_flag,
    )

    def __post_init__(self) -> None:
        for setting in fields(self):
            value, rule = getattr(self, setting.name), setting.metadata
            if value is None:
                object.__setattr__(self, setting.name, setting.default)
            elif rule and not rule['allowed'](value):
                raise ConfigError(f'env_cfg.{rule["key"]}={value!r}: expected {rule["expected"]}')
            elif rule:
                object.__setattr__(self, setting.name, rule['convert'](value))


def parse_env_cfg(
    env_cfg: Mapping[str, Any], model_wrapper_cfg: Optional[Mapping[str, Any]] = None
) -> EnvCfg:
    """Check and read ``env_cfg``. Pure.

    A ``model_wrapper_cfg`` of type ``MMModelParallel`` means ``use_model_parallel=True``.

    MMSegmentation's default runtime names the backend ``nccl`` in every config. Unless the config
    also sets the accelerator ``cuda``, the name counts as inherited and is read as ``auto``, which
    on cuda means nccl too.

    Args:
        env_cfg: Value of ``env_cfg`` in the config.
        model_wrapper_cfg: Value of ``model_wrapper_cfg`` in the config, if it has one.

    Raises:
        ConfigError: If a key is unknown, a key of MapSage has a value that is not allowed, the
            wrapper contradicts ``use_model_parallel``, ``port`` or ``heartbeat_timeout`` of
            ``dist_cfg`` is not a valid number, or ``init_backend`` is another library than torch.

    Example:
        >>> parse_env_cfg(dict(accelerator='gcu', dist_cfg=dict(timeout=600))).timeout
        600
        >>> parse_env_cfg(dict(acelerator='gcu'))
        Traceback (most recent call last):
        ...
        mapsage.engine.env_cfg.ConfigError: ...
    """
    _refuse_unknown('env_cfg', env_cfg, _KEYS)
    dist_cfg: Dict[str, Any] = dict(env_cfg.get('dist_cfg') or {})
    _refuse_unknown('env_cfg.dist_cfg', dist_cfg, _DIST_KEYS)
    use_model_parallel = _use_model_parallel(
        env_cfg.get('use_model_parallel'), (model_wrapper_cfg or {}).get('type')
    )
    backend, note = dist_cfg.get('backend', 'auto'), ''
    accelerator = env_cfg.get('accelerator') or 'auto'
    if backend == 'nccl' and accelerator != 'cuda':
        backend = 'auto'
        note = (
            f"env_cfg.dist_cfg.backend='nccl' is read as 'auto': with "
            f'env_cfg.accelerator={accelerator!r} it counts as inherited. Set '
            f"accelerator='cuda' to make it a choice."
        )
    init_backend = dist_cfg.get('init_backend', 'torch')
    if init_backend != 'torch':
        raise ConfigError(
            f"env_cfg.dist_cfg.init_backend={init_backend!r}: expected 'torch', "
            f'which starts the process group here. Remove the key.'
        )
    values = {**env_cfg, **{f'dist_cfg.{key}': value for key, value in dist_cfg.items()}}
    checked: Dict[str, Any] = {
        setting.name: values.get(setting.metadata['key'])
        for setting in fields(EnvCfg)
        if setting.metadata
    }
    return EnvCfg(
        accelerator=accelerator,
        backend=backend,
        timeout=dist_cfg.get('timeout', DEFAULT_TIMEOUT_SECONDS),
        use_model_parallel=use_model_parallel,
        note=note,
        cross_check_interval=_cross_check(env_cfg.get('cross_check')),
        **checked,
    )


def _cross_check(value: object) -> Optional[int]:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(
            f'env_cfg.cross_check={value!r}: expected dict(interval=N), which has another rank '
            f'compute a gradient again every N iterations, or None for no such checks.'
        )
    _refuse_unknown('env_cfg.cross_check', value, ('interval',))
    interval = value.get('interval', 200)
    if not _is_number(interval, int) or interval < 1:
        raise ConfigError(
            f'env_cfg.cross_check.interval={interval!r}: expected a whole number of iterations '
            f'from 1 on. Set env_cfg.cross_check=None for no checks.'
        )
    return interval


def short_name(kind: object) -> str:
    """Return the name of a ``type`` in a config, which may be a class or have a scope.

    Example:
        >>> short_name('mmengine.MMDistributedDataParallel')
        'MMDistributedDataParallel'
    """
    name = kind if isinstance(kind, str) else getattr(kind, '__name__', '')
    return name.rsplit('.', 1)[-1]


def _use_model_parallel(value: Any, wrapper_type: object) -> Optional[bool]:
    if value is not None and not _is_flag(value):
        raise ConfigError(
            f'env_cfg.use_model_parallel must be True, False or None, got {value!r}. None lets '
            f'MapSage decide.'
        )
    if short_name(wrapper_type) != 'MMModelParallel':
        return value
    if value is False:
        raise ConfigError(
            "env_cfg.use_model_parallel=False contradicts model_wrapper_cfg.type='MMModelParallel'."
            ' Remove one of them.'
        )
    return True


def _refuse_unknown(section: str, keys: Iterable[str], known: Iterable[str]) -> None:
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, list(known), 1)
            raise ConfigError(
                f'{section} has an unknown key {key!r}: expected {", ".join(known)}.'
                + (f' Did you mean {near[0]!r}?' if near else '')
            )
