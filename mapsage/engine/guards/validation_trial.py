"""One validation batch through model and metrics at the start of a training.

What a metric cannot take would otherwise end the run at its first validation, hours later.
``tools/train.py`` registers :class:`ValidationTrialHook`, and the doctor calls
:func:`metric_obstacle`; a Runner in another program starts as under MMEngine.
"""

from __future__ import annotations

import copy
from typing import Any, Iterable, Optional

import torch
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.runner import ValLoop

from mapsage.accelerator import current_accelerator
from mapsage.base.random_state import same_random_numbers
from mapsage.distributed import all_ranks_or_none, error_text
from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.loading.data_checks import explain_error
from mapsage.host.hook import MapSageHook
from mapsage.host.runner import HostRunner, metrics_of

# Larger images take long, and a scene takes minutes: the validation itself shows them.
_MOST_PIXELS = {True: 512 * 512, False: 2048 * 2048}
_PACKAGES = ('mmengine.', 'mmseg.', 'mapsage.')


def metric_obstacle(metrics: Iterable[BaseMetric], batch: Any, outputs: Any) -> Optional[str]:
    """Return a sentence about the first metric that cannot take a batch, or None.

    Copies of the metrics take it. One that cannot be copied, or that writes files, is not tried.

    Args:
        metrics: Metrics of the validation, with their ``dataset_meta``.
        batch: Batch of the validation's loader.
        outputs: What the model's ``val_step`` returned for it.
    """
    for metric in metrics:
        if getattr(metric, 'output_dir', None):
            continue
        try:
            trial = copy.deepcopy(metric)
        # A user's metric may hold anything.
        except Exception:
            continue
        try:
            Evaluator([trial]).process(copy.deepcopy(outputs), batch)
        # A user's metric may raise anything; the validation would end with it.
        except Exception as error:
            return (
                f'the first validation would fail: {type(metric).__name__} cannot take the '
                f'prediction of the first sample: {error_text(error)}. '
                f'Correct the metric, or take it out of val_evaluator.'
            )
    return None


class ValidationTrialHook(MapSageHook):
    """Predicts the first sample of the validation before the training, and shows it to the metrics.

    Not tried on lazy devices, where it would compile; with features from elsewhere; and where a
    hook of the user might prepare a validation.
    """

    priority = 'LOWEST'

    def before_train(self, runner: HostRunner) -> None:
        """Try the first sample. Collective.

        Raises:
            ConfigError, DataError: If the first validation would fail.
        """
        loop: Any = runner.val_loop
        if (
            type(loop) is not ValLoop
            or current_accelerator().lazy
            or runner.cfg.get('feature_source')
            or not all(type(hook).__module__.startswith(_PACKAGES) for hook in runner.hooks)
        ):
            return
        with all_ranks_or_none('trying a validation'), same_random_numbers(), torch.no_grad():
            dataset = loop.dataloader.dataset
            try:
                sample = dataset[0]
            # A user's dataset may raise anything.
            except Exception as error:
                raise explain_error(dataset, 0, error) from error
            shape = getattr(sample.get('inputs') if isinstance(sample, dict) else None, 'shape', ())
            on_cpu = current_accelerator().device_type == 'cpu'
            if not shape or shape[-1] * shape[-2] > _MOST_PIXELS[on_cpu]:
                return
            batch = loop.dataloader.collate_fn([sample])
            model: Any = runner.model
            modes = [(module, module.training) for module in model.modules()]
            outputs = model.eval().val_step(copy.deepcopy(batch))
            for module, mode in modes:
                module.training = mode
            obstacle = metric_obstacle(metrics_of(loop), batch, outputs)
            if obstacle:
                raise ConfigError(obstacle)
