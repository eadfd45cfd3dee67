"""One sample of each split, and one step with it on the CPU, as the doctor tries them."""
from __future__ import annotations

import logging
import random
import time
import warnings
from dataclasses import dataclass, field
from typing import Any, List, Mapping, Optional

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import DefaultScope
from torch import nn

from mapsage.distributed import error_text
from mapsage.engine.config_mistakes import explain_config_error
from mapsage.engine.loading.build import build_dataset, datasets_of_scenes, notes_on_scenes
from mapsage.engine.loading.data_checks import (
    build_checked,
    check_labels,
    explain_error,
    head_differences,
)

from .environment_checks import Finding

# A step of a larger model takes minutes on a CPU, and more memory than the model itself.
MOST_PARAMETERS = 10**9


@dataclass
class Trial:
    """What a successful step of :func:`try_split` leaves behind.

    Attributes:
        samples: Samples of the step; none if there was no step, or it failed.
        seconds: Time of the forward pass on the CPU, without gradients, for one sample.
    """

    samples: List[Any] = field(default_factory=list)
    seconds: float = 0.


def try_split(cfg: Config, loader: str, model: nn.Module,
              trial: Optional[Trial] = None) -> List[Finding]:
    """Load two samples of a split and carry out a step with them; return what went wrong.

    Args:
        cfg: Complete config, whose folders of data exist.
        loader: ``'train_dataloader'``, for a forward pass and its loss, or that of another split,
            for a prediction.
        model: Model of the config on the CPU, without weights; SyncBN in it is replaced.
        trial: Object that gets the samples of a step that succeeded, and its time.

    Returns:
        Findings of the level ``problem`` (for test data ``note``, as they do not keep a training
        from starting), or one that says what was tried.
    """
    scope = DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmengine'))
    with scope, warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter('ignore')  # the run shows them
        states = random.getstate(), np.random.get_state()
        try:
            return _try_split(cfg, loader, model, trial or Trial())
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _try_split(cfg: Config, loader: str, model: nn.Module, trial: Trial) -> List[Finding]:
    config = cfg[loader]
    level = 'note' if loader == 'test_dataloader' else 'problem'
    try:
        dataset = build_checked(build_dataset, config['dataset'])
        for scenes in datasets_of_scenes(dataset) if loader != 'train_dataloader' else ():
            scenes.score_once()
        found = [Finding('note' if importance >= logging.WARNING else 'ok', f'{loader}: {text}')
                 for importance, text in notes_on_scenes(dataset)]
    except Exception as error:  # whatever it is, a training would end with it
        return [Finding(level, f'{loader}: {error_text(explain_config_error(error))}')]
    if not hasattr(dataset, '__len__') or config.get('collate_fn'):
        return [*found, Finding('no', f'{loader}: no step was tried with its samples')]
    found += [Finding(level if fails else 'note', f'{loader}: {text}')
              for fails, text in head_differences(model, dataset)]
    if any(finding.level == 'problem' for finding in found):
        return found
    samples = []
    for index in range(min(len(dataset), 2)):
        try:
            samples.append(dataset[index])
            check_labels(dataset, index, samples[-1])
        except Exception as error:  # any transform may fail
            return [*found, Finding(level, f'{loader}: '
                                    f'{error_text(explain_error(dataset, index, error))}')]
    trained = loader == 'train_dataloader'
    what = 'one step' if trained else 'one prediction'
    if sum(parameter.numel() for parameter in model.parameters()) > MOST_PARAMETERS:
        return [*found, Finding('no', f'{loader}: {what} was not tried with so large a model')]
    batch = samples[:config.get('batch_size') or 1] if trained else samples[:1]
    start = time.perf_counter()
    try:
        _step(revert_sync_batchnorm(model), pseudo_collate(batch), trained)
    except Exception as error:  # any model may fail
        shape = tuple(getattr(samples[0].get('inputs'), 'shape', ())) if isinstance(
            samples[0], Mapping) else ''
        return [*found, Finding(level, f'{loader}: {what} with its first sample (C, H, W = '
                                f'{shape}) fails: {error_text(error)}')]
    trial.samples, trial.seconds = batch, (time.perf_counter() - start) / len(batch)
    return [*found, Finding('ok', f'{loader}: {len(dataset)} samples, {what} with the first')]


def _step(model: Any, batch: Any, trained: bool) -> None:
    with torch.no_grad():
        data = model.train(trained).data_preprocessor(batch, trained)
        losses = model(**data, mode='loss' if trained else 'predict')
        if trained:
            model.parse_losses(losses)
