"""Reading the tensors of weight files: MMEngine's checkpoints, safetensors, Hugging Face folders.

Nothing in a file is executed: ``mapsage/compat/checkpoint_loading.py`` lets PyTorch unpickle
tensors and plain values only. The modules of the backbones know what the names of tensors mean.
"""

from __future__ import annotations

import os
import pickle
from typing import Any, Dict, List, Mapping

import torch
from mmengine.runner import CheckpointLoader

from mapsage.base.errors import UserError
from mapsage.base.files import parse_json

State = Dict[str, torch.Tensor]


class WeightsError(UserError, ValueError):
    """A weight file is missing, damaged, or belongs to another model."""


def read_tensors(path: str, prefix: str, model: str, origin: str) -> State:
    """Read the tensors of a file or folder to the CPU, under their original names.

    Args:
        path: Path or URL of a checkpoint that MMEngine reads, or path of a ``.safetensors`` file
            or of a folder with ``model.safetensors``, or ``model.safetensors.index.json`` and its
            shards.
        prefix: Prefix of the keys to read; it is removed, as by MMEngine's ``Pretrained``. ''
            for all keys.
        model: Model that the file should contain, such as 'a DINOv3 ViT', for messages.
        origin: Sentence that says where the published files are, for messages.

    Raises:
        ImportError: If the file needs the package safetensors, which is missing.
        WeightsError: If a file is missing or cannot be read, no key begins with ``prefix``, or an
            entry is not a tensor.
    """
    state: Dict[str, torch.Tensor] = {}
    if os.path.isdir(path) or path.endswith('.safetensors'):
        for file in _safetensors_files(path):
            state.update(_read_safetensors(file, origin))
    else:
        loaded = _read_pickle(path, origin)
        for wrapper in ('state_dict', 'model'):
            if isinstance(loaded.get(wrapper), Mapping):
                loaded = loaded[wrapper]
        state.update(loaded)
    if prefix:
        dotted = prefix.rstrip('.') + '.'
        state = {
            key[len(dotted) :]: value for key, value in state.items() if key.startswith(dotted)
        }
    non_tensors = [key for key, value in state.items() if not isinstance(value, torch.Tensor)]
    if non_tensors or not state:
        raise WeightsError(
            f'{path} with prefix={prefix!r} has {len(state)} entries, of which '
            f'{non_tensors[:5]} are not tensors; expected a state dict of '
            f'{model}'
        )
    return state


def _read_pickle(path: str, origin: str) -> Dict[str, Any]:
    if '://' not in path and not os.path.exists(path):
        raise _missing(path, origin)
    try:
        return CheckpointLoader.load_checkpoint(path, map_location='cpu')
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise WeightsError(
            f'{path} cannot be read ({_size(path)}): {error}. It is not a '
            'checkpoint or was cut off; download it again.'
        ) from error


def _missing(path: str, origin: str) -> WeightsError:
    return WeightsError(
        f'weights {path} do not exist. {origin} Others: '
        'model.backbone.init_cfg.checkpoint=<file or folder>'
    )


def _size(path: str) -> str:
    return f'{os.path.getsize(path):,} bytes' if os.path.exists(path) else 'no local file'


def _safetensors_files(path: str) -> List[str]:
    if not os.path.isdir(path):
        return [path]
    whole, index = (os.path.join(path, f'model.safetensors{end}') for end in ('', '.index.json'))
    if os.path.exists(whole):
        return [whole]
    if not os.path.exists(index):
        raise WeightsError(
            f'{path} contains neither model.safetensors nor '
            f'model.safetensors.index.json, only {sorted(os.listdir(path))}'
        )
    try:
        with open(index, 'rb') as file:
            shards = sorted(set(parse_json(file.read())['weight_map'].values()))
        if not all(os.path.basename(name) == name != '' for name in shards):
            raise ValueError('names of files in this folder are expected')
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f'{index} cannot be read ({error!r}); download it again') from error
    missing = [name for name in shards if not os.path.exists(os.path.join(path, name))]
    if missing:
        raise WeightsError(
            f'{index} names {missing}, which {path} does not contain; complete the download'
        )
    return [os.path.join(path, name) for name in shards]


def _read_safetensors(file: str, origin: str) -> State:
    if not os.path.exists(file):
        raise _missing(file, origin)
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError(f'{file} needs a package: pip install safetensors') from error
    try:
        return load_file(file, device='cpu')
    except SafetensorError as error:
        raise WeightsError(
            f'{file} cannot be read ({_size(file)}): {error}. It was cut off or has '
            'another format; download it again.'
        ) from error
