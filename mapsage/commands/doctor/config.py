"""Checks of a config that need no run: files of the data, misspelled keys, the learning rates."""

from __future__ import annotations

import copy
import os
from typing import Any, Dict, Iterator, List, Mapping

from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DefaultScope
from torch import nn

from mapsage.commands.cli import LOADERS
from mapsage.distributed import error_text
from mapsage.engine.config import (
    datasets_in,
    explain_config_error,
    missing_trackers,
    misspelling_note,
    optimizer_mistake,
    value_mistakes,
)
from mapsage.engine.encoder_rates import encoder_rate_warning

from .finding import Finding


def check_data(cfg: Config) -> List[Finding]:
    """Return a finding for each missing file or folder of a dataset.

    Missing test data are a note only, because a training does not read them.
    """
    findings: List[Finding] = []
    for loader in LOADERS:
        dataset = (cfg.get(loader) or {}).get('dataset')
        missing = [path for config in datasets_in(dataset) for path in _missing_paths(config)]
        level = 'note' if loader == 'test_dataloader' else 'problem'
        findings += [
            Finding(
                level,
                f'{loader}: {path} does not exist',
                'put the data there, or point data_root and data_prefix at it '
                '(docs/reference/datasets.md)',
            )
            for path in dict.fromkeys(missing)
        ]
        if dataset is not None and not missing:
            findings.append(Finding('ok', f'{loader}: its folders exist'))
    return findings


def check_keys(cfg: Config) -> List[Finding]:
    """Return a note about keys that look like typos, and problems: trackers and values."""
    note = misspelling_note(cfg)
    return [Finding('note', text) for text in [note] if text] + [
        Finding('problem', text)
        for text in (*missing_trackers(cfg.get('visualizer')), *value_mistakes(cfg))
    ]


def check_encoder_rate(cfg: Config, model: nn.Module) -> List[Finding]:
    """Return a note if the optimizer trains a pretrained encoder at too high a learning rate."""
    wrapper = cfg.get('optim_wrapper') or {}
    # A config may have no optimizer, or several for different modules; neither is checked.
    if not isinstance(wrapper.get('optimizer'), dict):
        return []
    # Without the settings of precision and device, which this machine may lack.
    plain = {
        key: copy.deepcopy(value)
        for key, value in wrapper.items()
        if key in ('optimizer', 'constructor', 'paramwise_cfg')
    }
    # Old versions of torch do not have it.
    plain['optimizer'].pop('fused', None)
    try:
        with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmengine')):
            optim_wrapper = build_optim_wrapper(model, dict(plain, type='OptimWrapper'))
    # A user's optimizer may raise anything. The trial run reports the error in full.
    except Exception as error:
        reason = optimizer_mistake(plain) or error_text(explain_config_error(error))
        return [Finding('note', f'the optimizer cannot be built here: {reason}')]
    warning = encoder_rate_warning(model, optim_wrapper, cfg.get('load_from'))
    return [] if warning is None else [Finding('note', warning.text, warning.next_step)]


def _missing_paths(dataset: Mapping[str, Any]) -> Iterator[str]:
    """Yield the root, or else the annotation file and the folders, that do not exist."""
    root = dataset.get('data_root') or ''
    if '://' in root or dataset.get('backend_args'):
        return
    if root and not os.path.exists(root):
        yield root
        return
    prefixes: Dict[str, object] = dataset.get('data_prefix') or {}
    for path in (dataset.get('ann_file'), *prefixes.values()):
        if path and isinstance(path, str) and '://' not in path:
            full_path = os.path.join(root, path)
            if not os.path.exists(full_path):
                yield full_path
