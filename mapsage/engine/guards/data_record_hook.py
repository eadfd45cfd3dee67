"""Writes into checkpoints what the training data are, and compares them at a resume.

The record and its comparison are in `loading/data_record.py`.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from mmengine.dist import broadcast_object_list, is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mapsage.distributed import all_ranks_or_none
from mapsage.engine.loading.data_checks import DataError
from mapsage.engine.loading.data_record import (
    META_KEY,
    DataDifference,
    compare_records,
    facts_of_data,
)
from mapsage.engine.loading.passports import compare_with_passport
from mapsage.geo.passport import passport_of_checkpoint
from mapsage.host.runner import HostRunner


@HOOKS.register_module()
class DataRecordHook(Hook):
    """Hook that records the training data in checkpoints and compares them when a run is resumed.

    Rank 0 reads names, sizes and, for scenes, times of all files when the training begins. In a
    resumed run, another number or order of samples is an error, because the steps would get other
    samples than in an uninterrupted run. Other classes are an error, too, because the labels would
    mean something else. Other differences are a warning.

    ``MapSageRunner`` registers it.

    Args:
        accept: Whether the errors are warnings, too (``env_cfg.accept_other_data``).
    """

    priority = 'VERY_HIGH'

    def __init__(self, accept: bool = False) -> None:
        self._accept = accept
        # Record of the checkpoint that the run continues from, and of this run.
        self._before: Optional[Dict[str, Any]] = None
        self._record: Optional[Dict[str, Any]] = None
        self._is_resumed = False
        # Passport of the checkpoint that is tested.
        self._passport: Any = None

    def after_load_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Store the passport of the checkpoint, and its record if the run continues from it."""
        self._passport, _ = passport_of_checkpoint(checkpoint.get('meta'), 'the checkpoint')
        if runner._resume:
            self._is_resumed = True
            record = checkpoint.get('meta', {}).get(META_KEY)
            self._before = record if isinstance(record, dict) else None

    def before_train(self, runner: HostRunner) -> None:
        """Record the data, and compare them with the checkpoint's. Collective.

        Raises:
            DataError: On every rank, if the number, names or order of the samples, or
                the classes, differ.
        """
        differences: List[Optional[DataDifference]] = [None]
        with all_ranks_or_none('recording the training data'):
            if is_main_process():
                facts = facts_of_data(runner.train_dataloader.dataset)
                self._record = facts.record
                if self._before is not None:
                    differences = [compare_records(self._before, facts)]
        if not self._is_resumed:
            return
        if self._before is None:
            runner.logger.info(
                'the checkpoint does not record its training data: whether these '
                'are the same is not known'
            )
            return
        broadcast_object_list(differences, src=0)
        difference = differences[0]
        assert difference is not None
        self._report(runner, difference)

    def before_test(self, runner: HostRunner) -> None:
        """Compare the tested scenes with the passport of the checkpoint. Collective.

        Raises:
            DataError: On every rank, if they certainly differ.
        """
        with all_ranks_or_none('comparing the scenes with the passport'):
            if self._passport is None or not is_main_process():
                return
            for finding in compare_with_passport(runner.test_dataloader.dataset, self._passport):
                if finding.is_error and finding.kind != 'pixel':
                    raise DataError(finding.text)
                runner.logger.warning(finding.text)

    def before_save_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Add the record to the checkpoint."""
        if self._record is not None:
            checkpoint['meta'][META_KEY] = self._record

    def _report(self, runner: HostRunner, difference: DataDifference) -> None:
        texts = '; '.join([*difference.meaning, *difference.content])
        if not texts:
            return
        text = f'the training data are not those of the checkpoint: {texts}.'
        if difference.meaning and not self._accept:
            raise DataError(
                f'{text} The resumed run would not continue the training of the checkpoint. '
                f'Restore the data, start a new run with load_from and another work dir, or accept '
                f'the difference: --cfg-options env_cfg.accept_other_data=True.'
            )
        runner.logger.warning(f'{text} The run continues with them.')
