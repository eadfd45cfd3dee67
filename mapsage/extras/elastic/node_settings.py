"""Comparison of what the machines of a job run: code, config and training data.

Machines exchange texts and digests, never objects. Equal settings must give equal texts in every
process, so addresses and the order of sets are left out. `nodes.py` decides when the machines
compare.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Sized, Tuple

import torch
from mmengine.config import Config
from torch.utils.data import Dataset

from mapsage.distributed.launcher import ENCODERS_VARIABLE
from mapsage.host.dataset_parts import innermost, lists_samples
from mapsage.version import __version__
from mapsage_launcher.nodes.elastic import ELASTIC_VARIABLE

# Largest number of config keys, and of machines, that an error names.
MAX_NAMED = 4
# Number of training samples whose files are compared, spread over the dataset.
_COMPARED_SAMPLES = 64
# Top-level keys of a config that may differ between nodes without changing the result.
_NODE_KEYS = ('work_dir', 'resume', 'load_from', 'launcher')


def describe_settings(cfg: Config) -> Dict[str, Any]:
    """Return what must be equal on all nodes: versions, digests and the entries of the config.

    The entries are under ``config``, as returned by :func:`flat_config`.
    """
    # Only an elastic job relies on equal numbers of ranks, and encoder ranks do not count there.
    compares_ranks = ELASTIC_VARIABLE in os.environ and ENCODERS_VARIABLE not in os.environ
    ranks = {'ranks_per_node': os.environ.get('LOCAL_WORLD_SIZE', '1')} if compares_ranks else {}
    return dict(
        mapsage=f'{__version__} {code_digest()}',
        torch=torch.__version__,
        python=platform.python_version(),
        resume=bool(cfg.get('resume')),
        **ranks,
        config={
            key: value
            for key, value in flat_config(cfg).items()
            if key.split('.')[0] not in _NODE_KEYS
        },
    )


def describe_data(dataset: Optional[Dataset]) -> Dict[str, Any]:
    """Return the number of samples, and a digest of the names and sizes of some sample files.

    Empty for a dataset without a length.
    """
    if not isinstance(dataset, Sized):
        return {}
    count, digest, files = len(dataset), hashlib.blake2b(digest_size=4), 0
    for number in range(_COMPARED_SAMPLES if count else 0):
        inner, index = innermost(dataset, number * count // _COMPARED_SAMPLES)
        info = inner.get_data_info(index) if lists_samples(inner) else None
        for key in ('img_path', 'seg_map_path'):
            path = (info or {}).get(key)
            if isinstance(path, str) and os.path.isfile(path):
                files += 1
                digest.update(f'{os.path.basename(path)} {os.path.getsize(path)}\n'.encode())
    description: Dict[str, Any] = {'training samples': count}
    if files:
        description[f'names and sizes of {files} training files'] = digest.hexdigest()
    return description


def code_digest(folder: Optional[Path] = None) -> str:
    """Return a digest of the package's Python files, 8 hexadecimal digits.

    The folder .mim of a wheel is left out, because a checkout has these files elsewhere.
    """
    folder = Path(__file__).resolve().parents[2] if folder is None else folder
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(folder.rglob('*.py')):
        name = path.relative_to(folder)
        if name.parts[0] != '.mim':
            digest.update(str(name).encode() + b'\0' + path.read_bytes())
    return digest.hexdigest()


def flat_config(cfg: Mapping[str, Any]) -> Dict[str, str]:
    """Return the entries of a config: dotted key -> text that is equal on all machines."""
    entries: Dict[str, str] = {}

    def walk(value: Any, key: str) -> None:
        children = _children(value)
        for name, child in children:
            walk(child, f'{key}.{name}' if key else str(name))
        if not children:
            entries[key] = _portable_text(value)

    walk(cfg.to_dict() if isinstance(cfg, Config) else cfg, '')
    return entries


def _children(value: object) -> Sequence[Tuple[object, object]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return list(enumerate(sorted(value, key=repr)))
    return []


def _portable_text(value: object) -> str:
    """Return a value as text without addresses, which differ between processes."""
    if type(value).__repr__ is not object.__repr__:
        fallback = repr(value)
    else:
        fallback = type(value).__qualname__
    # Functions and classes have a name.
    text = str(getattr(value, '__qualname__', None) or fallback)
    return re.sub(' at 0x[0-9a-f]+', '', text)


def different_settings(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of an error about differing nodes; empty if they are equal. Pure.

    Args:
        settings: Name of the node -> settings of :func:`describe_settings`.
    """
    by_node = {
        name: {
            **{key: str(value) for key, value in node.items() if key != 'config'},
            **{f'config {key}': value for key, value in node['config'].items()},
        }
        for name, node in settings.items()
    }
    keys = sorted({key for node in by_node.values() for key in node})
    different = [key for key in keys if len({node.get(key) for node in by_node.values()}) > 1]
    if not different:
        return ''
    lines = [_difference_line(key, by_node) for key in different[:MAX_NAMED]]
    if len(different) > MAX_NAMED:
        lines.append(f'  and {len(different) - MAX_NAMED} more')
    paths_differ = any(
        '/' in str(node.get(key))
        for key in different
        if key.startswith('config ')
        for node in by_node.values()
    )
    return '\n'.join(
        [
            'the machines of this job differ, so that their ranks would not train the same:',
            *lines,
            'Start all with the same version of the code, the same '
            'config and the same number of ranks.'
            + (
                ' Where the data lie in different places, give them one path on all '
                'machines, such as a symbolic link.'
                if paths_differ
                else ''
            ),
        ]
    )


def _difference_line(key: str, by_node: Mapping[str, Mapping[str, str]]) -> str:
    nodes_with: Dict[Optional[str], List[str]] = {}
    for name, node in by_node.items():
        nodes_with.setdefault(node.get(key), []).append(name)
    return f'  {key}: ' + '; '.join(
        f'{"not set" if value is None else value[:200]} on {", ".join(names[:MAX_NAMED])}'
        + (f' and {len(names) - MAX_NAMED} more' if len(names) > MAX_NAMED else '')
        for value, names in nodes_with.items()
    )
