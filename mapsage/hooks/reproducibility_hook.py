"""Writes into checkpoints what the bits of a run depend on, and warns at a resume if it differs."""
from __future__ import annotations

import json
import socket
from typing import Any, Dict, List, Optional

from mmengine.dist import get_world_size
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mapsage.accelerator import current_accelerator
from mapsage.distributed import local_rank, open_channel

from .reproducibility import META_KEY, facts_of_process, group_ranks, resume_warning, unlike_ranks


@HOOKS.register_module()
class ReproducibilityHook(Hook):
    """Hook that records device, instruction set, threads, versions and settings of all ranks.

    The ranks gather them once, when the training begins; ranks that differ are named in the log,
    with their machines. Each checkpoint holds them. A run that is resumed and computes otherwise
    says what differs and what is no longer exact. Checkpoints without these facts are resumed
    without a word.

    Attributes:
        before: Groups of ranks of the checkpoint that was resumed, as in
            :mod:`mapsage.hooks.reproducibility`; None without one, or if it does not say.
        now: Groups of ranks of this run; empty until it begins.
    """

    priority = 'VERY_HIGH'

    def __init__(self) -> None:
        self.before: Optional[List[Dict[str, Any]]] = None
        self.now: List[Dict[str, Any]] = []

    def after_load_checkpoint(self, runner: Any, checkpoint: Dict[str, Any]) -> None:
        """Keep what the checkpoint says, if the run goes on from it."""
        if runner._resume:
            self.before = checkpoint.get('meta', {}).get(META_KEY)

    def before_train(self, runner: Any) -> None:
        """Gather the facts of all ranks, and compare them. Collective."""
        mine = facts_of_process(current_accelerator(), local_rank(), _reduction(runner))
        every = [json.loads(each) for each in open_channel(purpose='reproducibility').gather_texts(
            json.dumps([mine, socket.gethostname()]))]
        self.now = group_ranks([facts for facts, _ in every], [host for _, host in every])
        for warning in (unlike_ranks(self.now),
                        resume_warning(self.before, self.now) if self.before else ''):
            if warning:
                runner.logger.warning(warning)

    def before_save_checkpoint(self, runner: Any, checkpoint: Dict[str, Any]) -> None:
        """Add the facts to the checkpoint."""
        if self.now:
            checkpoint['meta'][META_KEY] = self.now


def _reduction(runner: Any) -> str:
    """Return how gradients are added, and over how many processes where the bits depend on it."""
    processes = get_world_size()
    ranks = getattr(runner, 'virtual_ranks', None)
    count = processes if ranks is None else ranks.count
    # Two numbers have one sum, in whichever order they are added.
    if count < 3 or getattr(runner.model, 'reduction', 'native') == 'ordered':
        return 'ordered'
    return f'native, {processes} processes'
