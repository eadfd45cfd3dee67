"""The features of MMEngine that run under both Runners, as changes to one tiny config.

Each :class:`Feature` is data: what it changes in the config of ``tiny_host.py``, and the Runners
that are built from it one after the other in the same work_dir, with the methods that are called.
"""

from __future__ import annotations

from typing import Tuple

from feature import EPOCHS, Feature
from run_features import CHECKPOINTS, HOOKS, LOOPS, TESTS
from training_features import (
    DATASETS,
    LOADERS,
    OPTIMIZATION,
    OTHER_MODELS,
    SCHEDULERS,
    TILES_254,
)

BATCHES_TWICE = 'MMEngine begins the epoch anew and trains on its first batches a second time'
NO_VALIDATION = 'a validation that was due at the checkpoint runs first; MMEngine never runs it'
DRAWS = 'a step and a sample draw from (seed, epoch, position), so that a resumed run is exact'

DIFFERENCES = (
    Feature(
        'resumed_within_an_epoch',
        {
            **EPOCHS,
            'default_hooks.checkpoint': dict(
                type='CheckpointHook', interval=3, by_epoch=False, save_last=False
            ),
        },
        (({'train_cfg.max_epochs': 1}, 'train'), ({'resume': True}, 'train')),
        differs=BATCHES_TWICE,
    ),
    Feature(
        'resumed_before_a_validation',
        EPOCHS,
        (({'train_cfg.max_epochs': 1}, 'train'), ({'resume': True}, 'train')),
        differs=NO_VALIDATION,
    ),
    Feature(
        'resumed_at_the_end',
        stages=(({}, 'train'), ({'resume': True}, 'train')),
        differs=NO_VALIDATION,
    ),
    Feature(
        'resumed_within_an_accumulation',
        {'optim_wrapper.accumulative_counts': 2},
        (({}, 'train'), ({'resume': True, 'load_from': '{work_dir}/iter_3.pth'}, 'train')),
        differs='MMEngine loses the gradients that were accumulated before the checkpoint',
    ),
    Feature('dropout', {'model.decode_head.dropout_ratio': 0.5}, differs=DRAWS),
    Feature(
        'random_augmentation',
        {
            'train_dataloader.dataset.pipeline.2': dict(type='RandomFlip', prob=0.5),
            'train_dataloader.dataset.pipeline.+': dict(type='PackSegInputs'),
        },
        differs=DRAWS,
    ),
    Feature(
        'a_loss_that_is_not_finite',
        {'optim_wrapper.optimizer.lr': 1e30, 'param_scheduler': ...},
        differs='training on with NaN costs days and overwrites the good checkpoints',
    ),
    Feature(
        'a_label_outside_the_classes',
        {'train_dataloader.dataset': dict(TILES_254, ignore_index=255)},
        fails='Target 254',
        differs='the error names the mask, the value and what is allowed',
    ),
    Feature(
        'a_missing_image',
        {'train_dataloader.dataset.img_suffix': '.jpg'},
        fails='concatenate',
        differs='the error names the folder that holds no image',
    ),
    Feature(
        'an_unknown_key_of_env_cfg',
        {'env_cfg': dict(cudnn_benchmrk=True)},
        differs='a setting that has no effect is a mistake',
    ),
)

FEATURES: Tuple[Feature, ...] = (
    *LOOPS,
    *CHECKPOINTS,
    *HOOKS,
    *TESTS,
    *OPTIMIZATION,
    *SCHEDULERS,
    *DATASETS,
    *LOADERS,
    *OTHER_MODELS,
    *DIFFERENCES,
)

# What MMEngine exports and cannot run here, with the reason; docs/reference/conformance.md
# repeats it.
CANNOT_RUN = dict(NPUProfilerHook='needs torch_npu and an Ascend device')
