"""Checks that need several ranks: their reports, their collectives, the built run.

Reports travel over the rendezvous store and not over a process group: a rank without a device
cannot enter a group, and the others would wait for it. Only `try_collectives` and `try_run` start a
group, after every rank has reported that it can join.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any, Dict, List, Mapping, Optional

import torch.distributed as dist
from mmengine.config import Config

from mapsage.accelerator import Accelerator
from mapsage.distributed import error_text, init_process_group, local_rank
from mapsage.distributed.device_checks import check_collectives, shared_cards
from mapsage.distributed.groups.process_group import uses_native_group
from mapsage.distributed.job_store import private_store, shared_store
from mapsage.engine.env_cfg import EnvCfg

from .finding import Finding
from .trial_run import RUN_IS_BUILT, run_obstacle

# Seconds until a report must have come. A rank first imports PyTorch and MMSegmentation, which
# takes longer on a busy machine, and may need twice _COLLECTIVE_SECONDS to find out that
# collectives do not work.
_REPORT_SECONDS = 180
_COLLECTIVE_SECONDS = 60
# Versions that must be equal on all ranks.
_EQUAL = ('torch', 'mapsage')


class Ranks:
    """Gathers the findings of every rank on rank 0, even where no process group can be started.

    The constructor and all methods are collective.

    Attributes:
        rank, world_size: This rank, and the number of ranks.
        all_join: Whether every rank can enter a process group; set by :meth:`compare`, equal on
            all ranks.
    """

    def __init__(self) -> None:
        self._deadline = timedelta(seconds=_REPORT_SECONDS)
        self.rank, self.world_size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
        store = private_store(_REPORT_SECONDS) or shared_store(_REPORT_SECONDS)
        self._store = dist.PrefixStore('mapsage-doctor', store)
        self.all_join = False

    def compare(self, report: Mapping[str, Any]) -> List[Finding]:
        """Return the findings about all ranks on rank 0, and none on other ranks.

        Args:
            report: Report of this rank: its ``host``, ``device``, ``card`` (equal if ranks share a
                card), ``problems`` (texts), whether it ``joins`` a process group, and the versions
                ``torch`` and ``mapsage``.
        """
        reports = self._gather('report', report)
        if self.rank == 0:
            self.all_join = all(
                rank in reports and reports[rank]['joins'] for rank in range(self.world_size)
            )
            self._store.set('verdict', 'join' if self.all_join else 'stay')
            # The store may live in this process, which must not end before all ranks have read.
            self._wait_for([f'read{rank}' for rank in range(1, self.world_size)])
            return compare_reports(reports, self.world_size)
        self._store.wait(['verdict'], self._deadline)
        self.all_join = self._store.get('verdict') == b'join'
        self._store.set(f'read{self.rank}', '')
        return []

    def try_collectives(self, accelerator: Accelerator, env: EnvCfg) -> List[Finding]:
        """Start the process group as a training does; return its problems on rank 0."""
        seconds = min(env.timeout, _COLLECTIVE_SECONDS)
        try:
            init_process_group(accelerator, env.backend, seconds)
        except (RuntimeError, ValueError) as error:
            problems = {
                'init_process_group': f'the process group does not start: {error_text(error)}'
            }
        else:
            problems = check_collectives(accelerator, local_rank(), seconds)
        reports = self._gather('collectives', problems)
        if self.rank > 0:
            return []
        findings = _late(reports, self.world_size) + _group_by_text(
            reports,
            '',
            'check the network between the machines (GLOO_SOCKET_IFNAME), or take '
            "env_cfg.dist_cfg.backend='gloo'",
        )
        if findings:
            return findings
        if uses_native_group(accelerator):
            return [
                Finding('ok', "the vendor's process group starts"),
                Finding('no', 'its collectives are not tested'),
            ]
        return [
            Finding(
                'ok', f'{self.world_size} ranks got the right answers over {dist.get_backend()}'
            )
        ]

    def try_run(self, cfg: Optional[Config], well: bool) -> List[Finding]:
        """Build the run on all ranks if rank 0 has no problem; return the findings on rank 0.

        Args:
            cfg: Config of the run; None if this rank could not read it.
            well: Whether this rank has no problem. Only rank 0's value counts.
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
        return _late(reports, self.world_size) + _group_by_text(
            reports, 'the run cannot be built there: '
        ) or [Finding('ok', RUN_IS_BUILT)]

    def wait_for_print(self) -> None:
        """Wait until rank 0 has printed; rank 0 calls this when it has.

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
            # The rank that sets the key has ended, which the launcher reports.
            except RuntimeError:
                return

    def _gather(self, name: str, report: Mapping[str, Any]) -> Dict[int, Dict[str, Any]]:
        """Return rank -> report on rank 0, except for ranks whose report comes too late."""
        self._store.set(f'{name}{self.rank}', json.dumps(report))
        reports: Dict[int, Dict[str, Any]] = {}
        end = time.monotonic() + _REPORT_SECONDS
        for rank in range(self.world_size if self.rank == 0 else 0):
            try:
                remaining = timedelta(seconds=max(1.0, end - time.monotonic()))
                self._store.wait([f'{name}{rank}'], remaining)
                reports[rank] = json.loads(self._store.get(f'{name}{rank}'))
            except RuntimeError:
                continue
        return reports


def _group_by_text(
    reports: Mapping[int, Mapping[str, str]], prefix: str, next_step: str = ''
) -> List[Finding]:
    """Return a problem for each different text in the reports, with the ranks that have it."""
    texts = dict.fromkeys(text for report in reports.values() for text in report.values())
    ranks = {
        text: [rank for rank, report in reports.items() if text in report.values()]
        for text in texts
    }
    return [
        Finding('problem', f'on rank(s) {ranks[text]}: {prefix}{text}', next_step) for text in texts
    ]


def _late(reports: Mapping[int, object], world_size: int) -> List[Finding]:
    return [
        Finding(
            'problem',
            f'rank {rank} has not reported within {_REPORT_SECONDS} s',
            'look at its machine and its output',
        )
        for rank in range(world_size)
        if rank not in reports
    ]


def compare_reports(reports: Mapping[int, Mapping[str, Any]], world_size: int) -> List[Finding]:
    """Return a line for each rank, the differences to rank 0, and problems of other ranks. Pure.

    Args:
        reports: Rank -> report as in :meth:`Ranks.compare`. Rank 0's report is there, others may be
            missing.
        world_size: Number of ranks.
    """
    findings = _late(reports, world_size)
    ranks_of: Dict[str, List[int]] = {}
    for rank, report in sorted(reports.items()):
        count = len(report['problems'])
        findings.append(
            Finding(
                'no' if count else 'ok',
                f'rank {rank} on {report["host"]}: {report["device"]}'
                + (f', {count} problem(s)' if count else ''),
            )
        )
        for text in report['problems']:
            ranks_of.setdefault(text, []).append(rank)
    for name in _EQUAL:
        expected = reports[0][name]
        different = {
            rank: report[name] for rank, report in reports.items() if report[name] != expected
        }
        if different:
            findings.append(
                Finding(
                    'problem',
                    f'{name} is {expected} on rank 0 and {different} by rank',
                    'install the same on every machine',
                )
            )
    cards = [reports[rank]['card'] if rank in reports else None for rank in range(world_size)]
    for rank, sharing_ranks in shared_cards(cards).items():
        if rank < min(sharing_ranks):
            findings.append(
                Finding(
                    'problem',
                    f'ranks {[rank, *sharing_ranks]} are on one card',
                    'start one rank per card, and give each rank of a machine a different LOCAL_RANK',
                )
            )
    # Rank 0 has printed its own problems already.
    return findings + [
        Finding('problem', f'on rank(s) {ranks}: {text}')
        for text, ranks in ranks_of.items()
        if 0 not in ranks
    ]
