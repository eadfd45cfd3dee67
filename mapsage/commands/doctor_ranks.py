"""The checks of the doctor that need several ranks."""
from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any, Dict, List, Optional

import torch.distributed as dist
from mmengine.config import Config

from mapsage.accelerator import Accelerator
from mapsage.distributed import error_text, init_process_group, local_rank
from mapsage.distributed.device_checks import check_collectives, shared_cards
from mapsage.distributed.groups.process_group import uses_native_group
from mapsage.distributed.job_store import private_store, shared_store
from mapsage.engine.env_cfg import EnvCfg

from .environment_checks import Finding
from .trial_run import RUN_IS_BUILT, run_obstacle

# Seconds for a report. A rank first imports PyTorch and MMSegmentation, which takes longer on a
# busy machine, and may need twice _COLLECTIVE_SECONDS to find that collectives do not work.
_REPORT_SECONDS = 180
_COLLECTIVE_SECONDS = 60
# Versions that must be equal on all ranks.
_EQUAL = ('torch', 'mapsage')


class Ranks:
    """Gathers the findings of every rank on rank 0, even where no process group can be started.

    Messages go over the rendezvous store: a rank without a device cannot enter a group, where the
    others would wait for it. Creating one is collective, and so are its methods.

    Attributes:
        all_join: Whether every rank can enter a process group; after :meth:`compare`, equal on all
            ranks.
    """

    def __init__(self) -> None:
        self._deadline = timedelta(seconds=_REPORT_SECONDS)
        self.rank, self.world_size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
        store = private_store(_REPORT_SECONDS) or shared_store(_REPORT_SECONDS)
        self._store = dist.PrefixStore('mapsage-doctor', store)
        self.all_join = False

    def compare(self, report: Dict[str, Any]) -> List[Finding]:
        """Return the findings about all ranks on rank 0, and none elsewhere.

        Args:
            report: Findings of this rank: its ``host``, ``device``, ``card`` (equal where ranks
                share one), ``problems`` (texts), whether it ``joins`` a process group, and the
                versions ``torch`` and ``mapsage``.
        """
        reports = self._gather('report', report)
        if self.rank == 0:
            self.all_join = all(rank in reports and reports[rank]['joins']
                                for rank in range(self.world_size))
            self._store.set('verdict', 'join' if self.all_join else 'stay')
            # This process may keep the store, so it must not end before all ranks have read.
            self._wait_for([f'read{rank}' for rank in range(1, self.world_size)])
            return compare_reports(reports, self.world_size)
        self._store.wait(['verdict'], self._deadline)
        self.all_join = self._store.get('verdict') == b'join'
        self._store.set(f'read{self.rank}', '')
        return []

    def try_collectives(self, accelerator: Accelerator, env: EnvCfg) -> List[Finding]:
        """Start the process group as a training does; return on rank 0 what does not work."""
        seconds = min(env.timeout, _COLLECTIVE_SECONDS)
        try:
            init_process_group(accelerator, env.backend, seconds)
        except (RuntimeError, ValueError) as error:
            wrong = {'init_process_group': f'the process group does not start: {error_text(error)}'}
        else:
            wrong = check_collectives(accelerator, local_rank(), seconds)
        every = self._gather('collectives', wrong)
        if self.rank > 0:
            return []
        findings = _late(every, self.world_size) + _by_text(
            every, '', 'check the network between the machines (GLOO_SOCKET_IFNAME), or take '
                       "env_cfg.dist_cfg.backend='gloo'")
        if findings:
            return findings
        if uses_native_group(accelerator):
            return [Finding('ok', "the vendor's process group starts"),
                    Finding('no', 'its collectives are not tested')]
        return [Finding('ok', f'{self.world_size} ranks got the right answers over '
                        f'{dist.get_backend()}')]

    def try_run(self, cfg: Optional[Config], well: bool) -> List[Finding]:
        """Build the run on all ranks if rank 0 has seen no problem; return its findings there.

        Args:
            cfg: Config of the run; None where this rank could not read it.
            well: Whether this rank has seen no problem; that of rank 0 counts.
        """
        if self.rank == 0:
            self._store.set('build', 'yes' if well else 'no')
        self._store.wait(['build'], self._deadline)
        if self._store.get('build') != b'yes' or cfg is None:
            return []
        obstacle = run_obstacle(cfg)
        reports = self._gather('run', {} if obstacle is None else {'run': obstacle})
        if self.rank > 0:
            return []
        return _late(reports, self.world_size) + _by_text(
            reports, 'the run cannot be built there: ') or [Finding('ok', RUN_IS_BUILT)]

    def wait_for_print(self) -> None:
        """Wait until rank 0 has printed, which it reports by calling this.

        The launcher ends all ranks as soon as one of them ends with an error.
        """
        if self.rank == 0:
            self._store.set('printed', '')
        else:
            self._wait_for(['printed'])

    def _wait_for(self, keys: List[str]) -> None:
        for key in keys:
            try:
                self._store.wait([key], self._deadline)
            except RuntimeError:  # the rank that sets it has ended, and the launcher reports it
                return

    def _gather(self, name: str, mine: Dict[str, Any]) -> Dict[int, Dict[str, Any]]:
        """Return the reports by rank on rank 0, without those of late ranks."""
        self._store.set(f'{name}{self.rank}', json.dumps(mine))
        every: Dict[int, Dict[str, Any]] = {}
        end = time.monotonic() + _REPORT_SECONDS
        for rank in range(self.world_size if self.rank == 0 else 0):
            try:
                left = timedelta(seconds=max(1.0, end - time.monotonic()))
                self._store.wait([f'{name}{rank}'], left)
                every[rank] = json.loads(self._store.get(f'{name}{rank}'))
            except RuntimeError:
                continue
        return every


def _by_text(reports: Dict[int, Dict[str, Any]], about: str,
             next_step: str = '') -> List[Finding]:
    """Return a problem for each different text in the reports, with the ranks that have it."""
    texts = dict.fromkeys(text for report in reports.values() for text in report.values())
    ranks = {text: [rank for rank, report in reports.items() if text in report.values()]
             for text in texts}
    return [Finding('problem', f'on rank(s) {ranks[text]}: {about}{text}', next_step)
            for text in texts]


def _late(every: Dict[int, Dict[str, Any]], world_size: int) -> List[Finding]:
    return [Finding('problem', f'rank {rank} has not reported within {_REPORT_SECONDS} s',
                    'look at its machine and its output')
            for rank in range(world_size) if rank not in every]


def compare_reports(reports: Dict[int, Dict[str, Any]], world_size: int) -> List[Finding]:
    """Return a line for each rank, the differences to rank 0, and problems of other ranks. Pure.

    Args:
        reports: Reports by rank, as :meth:`Ranks.compare` takes them, with that of rank 0.
        world_size: Number of ranks.
    """
    findings = _late(reports, world_size)
    ranks_of: Dict[str, List[int]] = {}
    for rank, report in sorted(reports.items()):
        count = len(report['problems'])
        findings.append(Finding('no' if count else 'ok',
                                f"rank {rank} on {report['host']}: {report['device']}"
                                + (f', {count} problem(s)' if count else '')))
        for text in report['problems']:
            ranks_of.setdefault(text, []).append(rank)
    for name in _EQUAL:
        first = reports[0][name]
        other = {rank: report[name] for rank, report in reports.items() if report[name] != first}
        if other:
            findings.append(Finding('problem', f'{name} is {first} on rank 0 and {other} by rank',
                                    'install the same on every machine'))
    cards = [reports[rank]['card'] if rank in reports else None for rank in range(world_size)]
    for rank, others in shared_cards(cards).items():
        if rank < min(others):
            findings.append(Finding(
                'problem', f'ranks {[rank, *others]} are on one card',
                'start one rank per card, and give each rank of a machine a different LOCAL_RANK'))
    # Rank 0 has printed its own problems already.
    return findings + [Finding('problem', f'on rank(s) {ranks}: {text}')
                       for text, ranks in ranks_of.items() if 0 not in ranks]
