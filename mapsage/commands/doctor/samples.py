"""A few samples of each split and one step with them on the CPU.

A failure here is a failure of the training: the dataset is built, samples are loaded and checked,
and the model computes a loss (training data) or a prediction (other data). The state of all random
generators is restored afterwards.
"""

from __future__ import annotations

import copy
import logging
import time
import warnings
from typing import Any, List, Mapping, Optional, Tuple

import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import DefaultScope
from PIL import Image
from torch import nn

from mapsage.base.random_state import same_random_numbers
from mapsage.distributed import error_text
from mapsage.engine.config import checkpoint_obstacle, explain_config_error
from mapsage.engine.guards import metric_obstacle
from mapsage.engine.loading.build import build_dataset, datasets_of_scenes, notes_on_scenes
from mapsage.engine.loading.data_checks import (
    build_checked,
    check_labels,
    explain_error,
    head_differences,
)
from mapsage.engine.loading.passports import compare_with_passport
from mapsage.geo.passport import passport_of_checkpoint
from mapsage.host.dataset_parts import innermost, lists_samples, loads_images, loads_masks
from mapsage.maps.model import read_checkpoint

from .finding import Finding
from .scene_copies import check_fast_copies, without_fast_copies

# A step of a larger model takes minutes on a CPU, and more memory than the model itself.
MOST_PARAMETERS = 10**9
# Samples that are loaded in any case, and the time for a look at the headers of all other files.
_FIRST, _SECONDS = 2, 5.0


def try_split(cfg: Config, loader: str, model: nn.Module) -> List[Finding]:
    """Load two samples of a split, run a step with them, and return the findings.

    Args:
        cfg: Complete config, whose folders of data exist.
        loader: ``'train_dataloader'``, for a forward pass with its loss, or another loader, for a
            prediction.
        model: Model of the config on the CPU, without weights; SyncBN in it is replaced.

    Returns:
        Findings of the level ``problem`` (``note`` for test data, which a training does not read),
        or a finding that tells what was tried.
    """
    scope = DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmengine'))
    with scope, warnings.catch_warnings(), same_random_numbers():
        # The run shows these warnings.
        warnings.simplefilter('ignore')
        return _try_split(cfg, loader, model)


def _try_split(cfg: Config, loader: str, model: nn.Module) -> List[Finding]:
    config = cfg[loader]
    level = 'note' if loader == 'test_dataloader' else 'problem'
    try:
        dataset_config, settings = without_fast_copies(config['dataset'])
        dataset = build_checked(build_dataset, dataset_config)
        for scenes in datasets_of_scenes(dataset) if loader != 'train_dataloader' else ():
            scenes.score_once()
        findings = [
            Finding('note' if importance >= logging.WARNING else 'ok', f'{loader}: {text}')
            for importance, text in notes_on_scenes(dataset)
        ]
        findings += check_fast_copies(loader, datasets_of_scenes(dataset), settings)
        findings += _compare_with_checkpoint(cfg, loader, dataset)
    # A user's dataset may raise anything; a training would end with it.
    except Exception as error:
        return [Finding(level, f'{loader}: {error_text(explain_config_error(error))}')]
    if not hasattr(dataset, '__len__') or config.get('collate_fn'):
        return [*findings, Finding('no', f'{loader}: no step was tried with its samples')]
    findings += [
        Finding(level if fails else 'note', f'{loader}: {text}')
        for fails, text in head_differences(model, dataset)
    ]
    if any(finding.level == 'problem' for finding in findings):
        return findings
    samples = []
    for index in _chosen_samples(dataset):
        try:
            samples.append(dataset[index])
            check_labels(dataset, index, samples[-1])
        # A user's transform may raise anything.
        except Exception as error:
            return [
                *findings,
                Finding(level, f'{loader}: {error_text(explain_error(dataset, index, error))}'),
            ]
    trains = loader == 'train_dataloader'
    step = 'one step' if trains else 'one prediction'
    if sum(parameter.numel() for parameter in model.parameters()) > MOST_PARAMETERS:
        return [*findings, Finding('no', f'{loader}: {step} was not tried with so large a model')]
    batch = samples[: min(config.get('batch_size') or 1, _FIRST)] if trains else samples[:1]
    try:
        outputs = _run_step(revert_sync_batchnorm(model), pseudo_collate(batch), trains)
    # A user's model may raise anything.
    except Exception as error:
        shape = (
            tuple(getattr(samples[0].get('inputs'), 'shape', ()))
            if isinstance(samples[0], Mapping)
            else ''
        )
        return [
            *findings,
            Finding(
                level,
                f'{loader}: {step} with its first sample (C, H, W = '
                f'{shape}) fails: {error_text(error)}',
            ),
        ]
    if loader == 'val_dataloader':
        obstacle = metric_obstacle(_metrics(cfg, dataset), pseudo_collate(batch), outputs)
        if obstacle:
            return [*findings, Finding(level, f'{loader}: {obstacle}')]
    return [
        *findings,
        Finding('ok', f'{loader}: {len(dataset):,} sample(s), {step} with the first'),
    ]


def _metrics(cfg: Config, dataset: Any) -> List[BaseMetric]:
    evaluator = Evaluator(copy.deepcopy(cfg.get('val_evaluator') or []))
    evaluator.dataset_meta = getattr(dataset, 'metainfo', None)
    return list(evaluator.metrics)


def _compare_with_checkpoint(cfg: Config, loader: str, dataset: Any) -> List[Finding]:
    """Compare the images of a split with the passport of the checkpoint that the run starts from."""
    path = cfg.get('load_from')
    if not path or checkpoint_obstacle(path):
        # The doctor's check of the config's values says so once.
        return []
    passport, problem = passport_of_checkpoint(read_checkpoint(path).get('meta'), path)
    if passport is None:
        return [Finding('note', problem)]
    return [
        Finding('note', f'{loader}: {finding.text}')
        for finding in compare_with_passport(dataset, passport)
    ]


def _chosen_samples(dataset: Any) -> List[int]:
    """Return the first samples, and the first one whose image and mask differ in size or one is broken.

    Only the headers of the files are read, for at most ``_SECONDS``.
    """
    chosen = list(range(min(len(dataset), _FIRST)))
    end = time.monotonic() + _SECONDS
    for index in range(len(chosen), len(dataset)):
        inner, inner_index = innermost(dataset, index)
        if (
            not (lists_samples(inner) and loads_images(inner) and loads_masks(inner))
            or time.monotonic() > end
        ):
            break
        info = inner.get_data_info(inner_index)
        sizes = [_stored_size(info.get(key)) for key in ('img_path', 'seg_map_path')]
        if sizes[0] != sizes[1]:
            return [*chosen, index]
    return chosen


def _stored_size(path: object) -> Optional[Tuple[int, ...]]:
    """Return the two sides of a picture in order of length; None if Pillow cannot read it."""
    try:
        with Image.open(str(path)) as picture:
            # A loader may turn a picture by its EXIF.
            return tuple(sorted(picture.size))
    except OSError:
        return None


def _run_step(model: Any, batch: object, trains: bool) -> Any:
    with torch.no_grad():
        data = model.train(trains).data_preprocessor(batch, trains)
        outputs = model(**data, mode='loss' if trains else 'predict')
        return model.parse_losses(outputs) if trains else outputs
