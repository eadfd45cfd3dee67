"""The doctor's report: whether a training would start here, and the reasons, without training.

`Doctor` examines what one process sees. `diagnose` prints its sections, lets the ranks of a
launcher compare theirs (`ranks.py`), builds the run, and decides the exit status. Rank 0 prints; a
single process is rank 0.
"""

from __future__ import annotations

import argparse
import functools
import os
import socket
from typing import Callable, Dict, List, Optional, Sequence, Type

import torch
from mmengine.config import Config

from mapsage.accelerator import ACCELERATORS, Accelerator, AcceleratorError, resolve_accelerator
from mapsage.accelerator.resolve import why_not
from mapsage.commands.cli import LOADERS, build_model, read_config
from mapsage.distributed import (
    BackendError,
    StrategyError,
    local_rank,
    resolve_backend,
    resolve_strategy,
)
from mapsage.distributed.device_checks import card_identity, check_device
from mapsage.distributed.groups.process_group import check_ranks_fit
from mapsage.distributed.launcher_notes import note_for_launcher
from mapsage.distributed.strategy import format_bytes
from mapsage.engine.env_cfg import ConfigError, EnvCfg, parse_env_cfg
from mapsage.engine.startup import identify_process
from mapsage.engine.training_memory import estimate_training_bytes
from mapsage.version import __version__
from mapsage_launcher.shipped import script

from .config import check_data, check_encoder_rate, check_keys
from .environment import check_environment, check_installed
from .finding import Finding
from .ranks import Ranks
from .samples import try_split
from .trial_run import RUN_IS_BUILT, run_obstacle


class Doctor:
    """Findings about everything that this process sees.

    Args:
        args: Options of :func:`mapsage.commands.cli.build_parser`; ``config`` may be None.

    Attributes:
        launched: Whether a launcher started this process and its variables are complete.
        printing: Whether this rank prints; True in a single process.
        config: Config of the run; None without a config that can be read.
        sections: Title of a section -> its findings, in the order of printing.
        accelerator: Accelerator that a training would use; None if no accelerator can be used.
        device, card: Texts for this rank's device; ranks on the same card have the same ``card``.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.sections: Dict[str, List[Finding]] = {
            title: [] for title in ('installed', 'accelerators', 'strategy', 'environment')
        }
        self.env = EnvCfg(accelerator=args.accelerator or 'auto')
        self.config: Optional[Config] = None
        self.accelerator: Optional[Accelerator] = None
        self.device = 'no device'
        self.card: Optional[str] = None
        # A copy, because stale variables are cleared below.
        self.environ = dict(os.environ)
        self.printing = args.launcher == 'none' or self.environ.get('RANK', '0') == '0'
        self._identified = self._identify()
        self.launched = self._identified and args.launcher != 'none'
        self.sections['installed'] = list(check_installed())
        needed_bytes = self._examine_config() if args.config else None
        self._choose_accelerator()
        if self.accelerator is None:
            self.sections['strategy'].append(Finding('no', 'not decided without an accelerator'))
        else:
            self._examine_strategy(self.accelerator, needed_bytes)
        self.sections['environment'] += check_environment(
            self.environ, self.accelerator, args.launcher
        )
        if not self.sections['environment']:
            self.sections['environment'] = [Finding('ok', 'nothing that contradicts the run')]

    @property
    def problems(self) -> List[Finding]:
        """Findings that keep a training from starting."""
        return [
            finding
            for findings in self.sections.values()
            for finding in findings
            if finding.level == 'problem'
        ]

    @property
    def joins(self) -> bool:
        """Whether this rank can enter a process group, whatever its config and data."""
        findings = self.sections['accelerators'] + self.sections['strategy']
        return self.launched and all(finding.level != 'problem' for finding in findings)

    def _identify(self) -> bool:
        """Read the launcher's variables, or clear stale ones, as the Runner does.

        Returns:
            Whether the variables are valid.
        """
        try:
            cleared = identify_process(self.args.launcher)
        except ValueError as error:
            self.sections['strategy'].append(Finding('problem', str(error)))
            return False
        if cleared:
            stale = ', '.join(f'{name}={value}' for name, value in cleared.items())
            self.sections['environment'].append(
                Finding(
                    'note',
                    f'left over from another launcher, cleared by a run: {stale}',
                    f'unset {" ".join(cleared)}',
                )
            )
        return True

    def _examine_config(self) -> Optional[int]:
        """Fill the section of the config; return the bytes that its training needs, or None."""
        findings = self.sections.setdefault(f'config {self.args.config}', [])
        try:
            cfg = read_config(self.args)
            self.env = parse_env_cfg(cfg.get('env_cfg') or {}, cfg.get('model_wrapper_cfg'))
        except ConfigError as error:
            findings.append(Finding('problem', str(error)))
            return None
        findings.append(Finding('ok', 'it can be read, and so can its env_cfg'))
        self.config = cfg
        if self.env.note:
            findings.append(Finding('note', self.env.note))
        findings += check_data(cfg)
        # Trackers run on rank 0 only.
        findings += check_keys(cfg) if self.printing else []
        # Under a launcher the strategy does not depend on the model, so rank 0's findings suffice.
        return self._examine_model(cfg, findings) if self.printing else None

    def _examine_model(self, cfg: Config, findings: List[Finding]) -> Optional[int]:
        """Add findings about model and samples; return the bytes that a training needs, or None."""
        try:
            model = build_model(cfg)
        except ConfigError as error:
            findings.append(Finding('problem', str(error)))
            return None
        needed_bytes = estimate_training_bytes(model, cfg.get('optim_wrapper'))
        count = sum(parameter.numel() for parameter in model.parameters())
        findings.append(
            Finding(
                'ok',
                f'model {type(model).__name__}: {count:,} parameters, '
                f'{format_bytes(needed_bytes)} with gradients and optimizer state; activations come on '
                f'top',
            )
        )
        findings += check_encoder_rate(cfg, model)
        levels = {
            name: finding.level
            for finding in findings
            for name in LOADERS
            if finding.text.startswith(f'{name}:')
        }
        for number, loader in enumerate(LOADERS):
            is_repeated = any(cfg.get(loader) == cfg.get(earlier) for earlier in LOADERS[:number])
            if levels.get(loader) == 'ok' and not is_repeated:
                findings += try_split(cfg, loader, model)
        return needed_bytes

    def _choose_accelerator(self) -> None:
        findings = self.sections['accelerators']
        name = self.env.accelerator
        try:
            self.accelerator = resolve_accelerator(name)
            reason = 'found by auto' if name == 'auto' else 'chosen by name'
            findings.append(Finding('ok', f'{self.accelerator.describe()}: {reason}'))
        except AcceleratorError as error:
            findings.append(Finding('problem', str(error)))
        for kind in ACCELERATORS:
            if type(self.accelerator) is not kind:
                findings.append(Finding('no', f'{kind.name}: {_reason_against(kind)}'))

    def _examine_strategy(self, accelerator: Accelerator, needed_bytes: Optional[int]) -> None:
        findings = self.sections['strategy']
        try:
            per_node = os.environ.get('LOCAL_WORLD_SIZE', '1') if self.launched else '1'
            check_ranks_fit(accelerator, int(per_node))
            rank = local_rank() if self.launched else 0
            accelerator.set_device(rank)
            memory = accelerator.memory_total()
            if self._identified:
                strategy = resolve_strategy(
                    self.env.use_model_parallel,
                    os.environ,
                    accelerator.device_count(),
                    launcher=self.args.launcher,
                    needed_bytes=needed_bytes,
                    device_bytes=memory,
                )
                findings.append(Finding('ok', f'{strategy.name}: {strategy.reason}'))
            backend = resolve_backend(accelerator, self.env.backend)
            purpose = (
                'gradients and control traffic' if self.launched else 'not used by one process'
            )
            findings.append(Finding('ok', f'backend {backend}: {purpose}'))
            self.device = str(accelerator.device(rank))
            self.card = card_identity(accelerator, rank)
        except (AcceleratorError, BackendError, StrategyError) as error:
            findings.append(Finding('problem', str(error)))
            return
        size = '' if memory is None else f', {format_bytes(memory)}'
        findings += [Finding('problem', text) for text in check_device(accelerator, rank)] or [
            Finding('ok', f'{self.device} allocates and computes{size}')
        ]
        probes = accelerator.describe_probes()
        if probes and findings[-1].level == 'ok':
            findings.append(Finding('ok', probes))


def diagnose(
    args: argparse.Namespace, say: Callable[[str], None] = functools.partial(print, flush=True)
) -> int:
    """Print the report and return the exit status: 0 if a training would start.

    Under a launcher every rank examines itself, rank 0 prints, and all ranks test their
    collectives.

    Args:
        args: Options of :func:`mapsage.commands.cli.build_parser`; ``config`` may be None.
        say: Function that prints a section of the report.
    """
    doctor = Doctor(args)
    if doctor.printing:
        say(f'mapsage {__version__} doctor on {socket.gethostname()}')
        for title, findings in doctor.sections.items():
            say(_section(title, findings))
    ranks = Ranks() if doctor.launched else None
    findings = doctor.problems
    if ranks is not None:
        rank_findings = ranks.compare(
            dict(
                host=socket.gethostname(),
                device=doctor.device,
                card=doctor.card,
                joins=doctor.joins,
                torch=torch.__version__,
                mapsage=__version__,
                problems=[finding.text for finding in findings],
            )
        )
        if doctor.printing:
            say(_section('ranks', rank_findings))
        collectives = [Finding('no', 'not tested: not every rank has a device and a strategy')]
        if ranks.all_join and doctor.accelerator is not None:
            collectives = ranks.try_collectives(doctor.accelerator, doctor.env)
        findings += rank_findings + collectives
    else:
        collectives = [
            Finding(
                'no',
                'not tested in one process',
                f'{script("doctor")} [CONFIG] tests those of NPROC_PER_NODE ranks',
            )
        ]
    run_findings = _try_run(doctor, ranks, all(finding.level != 'problem' for finding in findings))
    findings += run_findings
    problems = {finding.text for finding in findings if finding.level == 'problem'}
    well = not problems and (ranks is None or ranks.all_join)
    if doctor.printing:
        say(_section('collectives', collectives))
        if run_findings:
            say(_section('run', run_findings))
        say(
            '\nresult: '
            + (
                'training would start'
                if well
                else f'training would not start, {len(problems)} problem(s)'
            )
        )
        if not well:
            note_for_launcher(f'doctor: {len(problems)} problem(s), see its report above')
    if ranks is not None:
        ranks.wait_for_print()
    return 0 if well else 1


def _try_run(doctor: Doctor, ranks: Optional[Ranks], well: bool) -> List[Finding]:
    """Build the run of the config if there is no problem so far. Collective under a launcher."""
    if ranks is not None:
        return ranks.try_run(doctor.config, well) if ranks.all_join else []
    if doctor.config is None or not well:
        return []
    obstacle = run_obstacle(doctor.config)
    return [
        Finding('ok', RUN_IS_BUILT)
        if obstacle is None
        else Finding('problem', f'the run cannot be built: {obstacle}')
    ]


def _reason_against(kind: Type[Accelerator]) -> str:
    """Return the reason why an accelerator was not chosen."""
    try:
        reason = why_not(kind)
    except AcceleratorError as error:
        return str(error)
    if reason is None:
        return 'usable, by name only: simulated' if kind.simulated else 'usable, not chosen'
    return reason


def _section(title: str, findings: Sequence[Finding]) -> str:
    return '\n'.join(['', title, *map(str, findings)])
