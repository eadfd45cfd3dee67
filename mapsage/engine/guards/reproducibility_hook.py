"""Writes into checkpoints what the bits of a run depend on, and warns at a resume if it differs.

The facts and the texts are in `reproducibility.py`, which is pure. Facts that differ are never an
error: the run is sound, and only its last bits change.
"""

from __future__ import annotations

import json
import socket
from typing import Any, Dict, List, Optional

from mmengine.dist import get_world_size
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mapsage.accelerator import current_accelerator
from mapsage.distributed import local_rank, open_channel
from mapsage.distributed.wrappers import MMDistributedDataParallel, VirtualDataParallel
from mapsage.host.runner import HostRunner, MapSageRun
from mapsage.models.weight_license import (
    LICENSES_KEY,
    describe_restrictions,
    find_licenses,
    recorded_licenses,
)

from .reproducibility import META_KEY, facts_of_process, group_ranks, resume_warning, unlike_ranks


@HOOKS.register_module()
class ReproducibilityHook(Hook):
    """Hook that records device, instruction set, threads, versions and settings of all ranks.

    It also records the licenses of the pretrained weights, which apply to the trained weights, too;
    those of a checkpoint that the run starts from are added.

    The ranks gather them once, when the training begins; the log names ranks that differ, with
    their machines. Each checkpoint holds the facts. If they differ from the facts of the
    checkpoint, a resumed run logs what differs and what is no longer exact. Checkpoints without
    these facts are resumed without a message.

    Attributes:
        before: Groups of ranks of the checkpoint that was resumed, as `reproducibility.py`
            describes them; None without a checkpoint or without its facts.
        now: Groups of ranks of this run; empty until it begins.
    """

    priority = 'VERY_HIGH'

    def __init__(self) -> None:
        self.before: Optional[List[Dict[str, Any]]] = None
        self.now: List[Dict[str, Any]] = []
        self._licenses: List[Dict[str, str]] = []

    def after_load_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Store the licenses of the checkpoint, and its facts if the run continues from it."""
        meta = checkpoint.get('meta')
        meta = meta if isinstance(meta, dict) else {}
        self._licenses = [license_._asdict() for license_ in recorded_licenses(meta)]
        restrictions = describe_restrictions(meta, 'The checkpoint')
        if restrictions:
            runner.logger.info(restrictions)
        if runner._resume:
            self.before = meta.get(META_KEY)

    def before_train(self, runner: HostRunner) -> None:
        """Gather the facts of all ranks, and compare them. Collective."""
        local_facts = facts_of_process(current_accelerator(), local_rank(), _reduction(runner))
        texts = open_channel(purpose='reproducibility').gather_texts(
            json.dumps([local_facts, socket.gethostname()])
        )
        facts, hosts = zip(*(json.loads(text) for text in texts))
        self.now = group_ranks(facts, hosts)
        for warning in (
            unlike_ranks(self.now),
            resume_warning(self.before, self.now) if self.before else '',
        ):
            if warning:
                runner.logger.warning(warning)

    def before_save_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Add the facts and the licenses to the checkpoint."""
        if self.now:
            checkpoint['meta'][META_KEY] = self.now
        licenses = [license_._asdict() for license_ in find_licenses(runner.model)]
        licenses += [entry for entry in self._licenses if entry not in licenses]
        if licenses:
            checkpoint['meta'][LICENSES_KEY] = licenses


def _reduction(runner: HostRunner) -> str:
    """Return how gradients are added, and over how many processes if the bits depend on it."""
    processes = get_world_size()
    count = runner.virtual_ranks.count if isinstance(runner, MapSageRun) else processes
    # Two numbers have one sum, in whichever order they are added.
    if count < 3 or _adds_in_order(runner):
        return 'ordered'
    return f'native, {processes} processes'


def _adds_in_order(runner: HostRunner) -> bool:
    # Other wrappers, such as MMEngine's, add natively.
    return (
        isinstance(runner.model, (MMDistributedDataParallel, VirtualDataParallel))
        and runner.model.reduction == 'ordered'
    )
