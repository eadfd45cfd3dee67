"""Load checkpoints without running code in them.

Gap: mmengine 0.10.7 calls ``torch.load`` without options. From torch 2.6 on, this refuses its
own checkpoints (HistoryBuffer); with older torch it unpickles anything, as onedl-mmengine does when
other ways fail. Here an allow-list decides, with every torch. Neither mmengine reads safetensors,
and torch ignores the checksums in its files.
Remove when: the host's loaders have an allow-list and no fallback, and torch reads the checksums.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from typing import IO, Any, Callable, Dict, Optional, Tuple, Union
from urllib.parse import urlparse

import numpy as np
import torch
from mmengine.config import ConfigDict
from mmengine.dist import barrier
from mmengine.logging.history_buffer import HistoryBuffer
from mmengine.optim.scheduler.param_scheduler import OneCycleParamScheduler
from mmengine.runner import checkpoint
from mmengine.runner.checkpoint import CheckpointLoader
from mmengine.structures import BaseDataElement, InstanceData, LabelData, PixelData

from mapsage.base.errors import UserError
from mapsage.base.files import parse_json
from mapsage.base.stand_ins import Delegate

# Since torch 2.6 the allow-list of torch.load(weights_only=True) accepts (object, name) pairs.
_HAS_ALLOW_LIST = hasattr(torch.serialization, 'safe_globals')
# Argument map_location of torch.load.
_MapLocation = Union[None, str, torch.device, Callable[..., Any], Dict[str, str]]
_ZIP_START = b'PK\x03\x04'
_CHUNK_BYTES = 4 << 20
# Messages with which torch's weights_only unpickler refuses an object (2.6 to 2.13).
_REFUSED = re.compile(
    r'Unsupported global|unrecognized function|[Uu]nsupported class|'
    r'Can only (build|create|SETITEM|SETITEMS)|Trying to (load|instantiate)|'
    r'asks for attribute'
)


class UnsafeCheckpointError(UserError, pickle.UnpicklingError):
    """A checkpoint contains an object that is not on the allow-list."""


class DamagedCheckpointError(UserError, RuntimeError):
    """A file is no checkpoint, or is truncated or damaged."""

    # A file system may fail for a moment.
    final = False


def load_from_local(filename: str, map_location: _MapLocation = None) -> Dict[str, Any]:
    """Load a local checkpoint file.

    Args:
        filename: Path of the file.
        map_location: Device mapping, as for ``torch.load``.

    Raises:
        FileNotFoundError: If there is no such file.
        UnsafeCheckpointError: If the file contains anything but tensors, plain containers, NumPy
            arrays and types of MMEngine that cannot run code.
        DamagedCheckpointError: If the file is truncated or damaged, or is not a checkpoint.
    """
    filename = os.path.expanduser(filename)
    if not os.path.exists(filename):
        raise FileNotFoundError(f'checkpoint {filename} does not exist.')
    if filename.endswith('.safetensors'):
        return _read_safetensors(filename, map_location)
    with open(filename, 'rb') as file:
        return _load(file, filename, map_location)


def _load(file: IO[bytes], filename: str, map_location: _MapLocation) -> Dict[str, Any]:
    try:
        _check_crc(file)
        return read_checkpoint(file, map_location)
    # All errors, because errors of damaged files have no common class.
    except Exception as error:
        reason = str(error).split('WeightsUnpickler error:')[-1].strip().split('\n')[0]
        if isinstance(error, UnsafeCheckpointError) or _REFUSED.search(str(error)):
            raise UnsafeCheckpointError(
                f'checkpoint {filename} holds objects that could run code when loaded: '
                f'{reason} If you trust its author, load it once yourself and save only its '
                f'state_dict.'
            ) from error
        raise DamagedCheckpointError(
            f'checkpoint {filename} is truncated or damaged, or no checkpoint at all '
            f'({type(error).__name__}: {reason}). Give another file.'
        ) from error


def _check_crc(file: IO[bytes]) -> None:
    """Compare the contents of a zip file with the checksums in it; torch does not.

    Legacy files of torch are no zip files and have no checksums. A file that was saved after
    ``torch.serialization.set_crc32_options(False)`` has zeros in their place.

    Raises:
        zipfile.BadZipFile: If a checksum is wrong, or the file is damaged otherwise.
    """
    is_zip = file.read(len(_ZIP_START)) == _ZIP_START
    file.seek(0)
    if not is_zip:
        return
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.CRC == 0:
                continue
            with archive.open(entry) as content:
                # Reading raises the error.
                while content.read(_CHUNK_BYTES):
                    pass
    file.seek(0)


def _read_safetensors(filename: str, map_location: _MapLocation) -> Dict[str, Any]:
    """Return the weights of a safetensors file, and the ``meta`` that a model card stores in it."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    # Read here, because safetensors cannot open a path that is not UTF-8.
    with open(filename, 'rb') as file:
        content = file.read()
    try:
        weights = load(content)
        # The format: 8 bytes with the length of a JSON header, then the header.
        header = parse_json(content[8 : 8 + int.from_bytes(content[:8], 'little')])
        meta = parse_json(header.get('__metadata__', {}).get('meta', '{}'))
        if not isinstance(meta, dict):
            raise ValueError(f'its meta is {str(meta)[:40]!r}')
    except (SafetensorError, ValueError) as error:
        raise DamagedCheckpointError(
            f'checkpoint {filename} is truncated or damaged, or no safetensors file ({error}). '
            f'Give another file.'
        ) from error
    if isinstance(map_location, (str, torch.device)):
        weights = {name: weight.to(map_location) for name, weight in weights.items()}
    return dict(state_dict=weights, meta=meta)


def read_checkpoint(file: IO[bytes], map_location: _MapLocation = None) -> Dict[str, Any]:
    """Read a checkpoint from a binary file.

    Raises:
        Exception: If the file is damaged or contains objects that are not on the allow-list; the
            type depends on torch.
    """
    if _HAS_ALLOW_LIST:
        pairs: Any = [(allowed, name) for name, allowed in _allowed().items()]
        with torch.serialization.safe_globals(pairs):
            return torch.load(file, map_location=map_location, weights_only=True)
    return torch.load(file, map_location=map_location, pickle_module=_RestrictedPickle)


def apply() -> bool:
    """Make MMEngine load local files with :func:`load_from_local`."""
    CheckpointLoader.register_scheme(prefixes='', loader=load_from_local, force=True)
    CheckpointLoader.register_scheme(
        prefixes=('http://', 'https://'), loader=load_from_http, force=True
    )
    # The loaders of torchvision:// and open-mmlab:// look this function up in the module.
    checkpoint.load_from_http = load_from_http
    # The loaders of s3://, petrel://, pavi:// and open-mmlab:// call torch.load, and onedl-mmengine
    # calls it again without the allow-list if the list refuses a file.
    checkpoint.torch = _TorchOfLoaders(torch)
    HistoryBuffer.__getstate__ = _state_of_buffer  # type: ignore[method-assign]
    return True


class _TorchOfLoaders(Delegate):
    """The module ``torch`` as MMEngine's loaders see it, whose ``load`` has the allow-list."""

    @staticmethod
    def load(
        file: Union[str, IO[bytes]], map_location: _MapLocation = None, **_: Any
    ) -> Dict[str, Any]:
        if isinstance(file, str):
            return load_from_local(file, map_location)
        return _load(file, 'of the storage', map_location)


def _state_of_buffer(buffer: HistoryBuffer) -> Dict[str, Any]:
    """Return the state of a buffer for pickle, without statistics that users have registered.

    The allow-list refuses these functions, and the class has them anyway.
    """
    return dict(
        vars(buffer),
        statistics_methods={
            name: method
            for name, method in buffer._statistics_methods.items()
            if name in _METHODS[HistoryBuffer]
        },
    )


def load_from_http(
    filename: str, map_location: _MapLocation = None, model_dir: Optional[str] = None
) -> Dict[str, Any]:
    """Download a checkpoint once per node, and load it like a local one. Collective.

    Args:
        filename: URL of the checkpoint.
        map_location: Device mapping, as for ``torch.load``.
        model_dir: Folder for the file; None for torch.hub's folder.
    """
    folder = model_dir or os.path.join(torch.hub.get_dir(), 'checkpoints')
    path = os.path.join(folder, os.path.basename(urlparse(filename).path))
    if os.environ.get('LOCAL_RANK', '0') == '0' and not os.path.exists(path):
        os.makedirs(folder, exist_ok=True)
        torch.hub.download_url_to_file(filename, path, progress=False)
    barrier()
    return load_from_local(path, map_location)


class _OneCycle:
    """Stand-in for OneCycleParamScheduler in a state, which names one of these two functions."""

    _annealing_cos = staticmethod(OneCycleParamScheduler._annealing_cos)
    _annealing_linear = staticmethod(OneCycleParamScheduler._annealing_linear)


# Methods that MMEngine's states pickle as calls of ``getattr``.
_METHODS: Dict[type, Tuple[str, ...]] = {
    HistoryBuffer: ('min', 'max', 'current', 'mean'),
    _OneCycle: ('_annealing_cos', '_annealing_linear'),
}


def _get_method(owner: object, name: str) -> Callable[..., object]:
    """Replacement of ``getattr`` in a checkpoint, which returns only the methods above."""
    if not isinstance(owner, type) or name not in _METHODS.get(owner, ()):
        raise UnsafeCheckpointError(f'it asks for attribute {name!r} of {owner!r}.')
    return getattr(owner, name)


def _allowed() -> Dict[str, Callable[..., Any]]:
    # By the version, because numpy 1.26 has a stub of numpy._core.
    core: Any = getattr(np, '_core' if np.__version__ >= '2' else 'core')
    allowed: Dict[str, Any] = {
        'mmengine.logging.history_buffer.HistoryBuffer': HistoryBuffer,
        'builtins.getattr': _get_method,
        'builtins.frozenset': frozenset,
        # Called by empty arrays and by bytes.
        'builtins.bytes': bytes,
        f'{OneCycleParamScheduler.__module__}.OneCycleParamScheduler': _OneCycle,
        'numpy.ndarray': np.ndarray,
        'numpy.dtype': np.dtype,
    }
    for kind in (ConfigDict, BaseDataElement, InstanceData, LabelData, PixelData):
        allowed[f'{kind.__module__}.{kind.__qualname__}'] = kind
    # Both names, so that NumPy 1 and 2 can read each other's files.
    for package in ('numpy.core', 'numpy._core'):
        for name in ('_reconstruct', 'scalar'):
            allowed[f'{package}.multiarray.{name}'] = getattr(core.multiarray, name)
    for code in '?bhilqBHILQefdgFDGUS':
        kind = type(np.dtype(code))
        allowed[f'{kind.__module__}.{kind.__qualname__}'] = kind
    return allowed


class _RestrictedPickle:
    """The parts of a pickle module that ``torch.load(pickle_module=)`` needs, for torch < 2.6."""

    # Functions that torch writes into a state dict, and containers (torch/_utils.py, 1.10 to 2.5).
    _TORCH_NAMES = ('_rebuild_tensor', '_rebuild_tensor_v2', '_rebuild_parameter')
    _PLAIN = {
        'collections.OrderedDict',
        'collections.defaultdict',
        'collections.Counter',
        'builtins.set',
        'builtins.dict',
        'builtins.slice',
        'builtins.complex',
        'builtins.bytearray',
        '_codecs.encode',
        'torch.Size',
        'torch.device',
    }

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            module = {'__builtin__': 'builtins'}.get(module, module)
            full_name = f'{module}.{name}'
            if full_name in _allowed():
                return _allowed()[full_name]
            attribute: object = getattr(torch, name, None) if module == 'torch' else None
            if (
                full_name in _RestrictedPickle._PLAIN
                or isinstance(attribute, torch.dtype)
                or (attribute is not None and name.endswith('Storage'))
                or (module == 'torch._utils' and name in _RestrictedPickle._TORCH_NAMES)
            ):
                return super().find_class(module, name)
            raise UnsafeCheckpointError(f'{full_name} is not on the allow-list.')

    @staticmethod
    def load(file: IO[bytes], **kwargs: Any) -> object:
        return _RestrictedPickle.Unpickler(file, **kwargs).load()

    @staticmethod
    def loads(data: bytes, **kwargs: Any) -> object:
        return _RestrictedPickle.load(io.BytesIO(data), **kwargs)
