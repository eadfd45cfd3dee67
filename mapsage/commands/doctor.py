"""Say whether a training would start here, and why or why not, without training."""
from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import platform
import socket
from importlib import metadata
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from mmengine.config import Config
from torch import nn

from mapsage.accelerator import ACCELERATORS, Accelerator, AcceleratorError, resolve_accelerator
from mapsage.accelerator.resolve import why_not
from mapsage.distributed import (
    BackendError,
    StrategyError,
    local_rank,
    resolve_backend,
    resolve_strategy,
)
from mapsage.distributed.device_checks import card_identity, check_device
from mapsage.distributed.groups.process_group import check_ranks_fit
from mapsage.distributed.nodes.launcher_notes import note_for_launcher
from mapsage.distributed.strategy import MODEL_PARALLEL, format_bytes
from mapsage.engine.env_cfg import ConfigError, EnvCfg, parse_env_cfg
from mapsage.engine.ranks.startup import identify_process
from mapsage.engine.training_memory import estimate_training_bytes
from mapsage.version import __version__
from mapsage_launcher.drivers import VENDOR_MODULES
from mapsage_launcher.shipped import script

from .config_checks import (
    LOADERS,
    build_model,
    check_data,
    check_encoder_rate,
    check_keys,
    read_config,
)
from .doctor_ranks import Ranks
from .environment_checks import Finding, check_environment
from .sample_checks import Trial, try_split
from .step_times import compare_precisions
from .trial_run import RUN_IS_BUILT, run_obstacle

# Distributions that install the same module: of two at once, one has overwritten the other.
_DISTRIBUTIONS = {
    'torch': ('torch',),
    'mmengine': ('onedl-mmengine', 'mmengine', 'mmengine-lite'),
    'mmcv': ('onedl-mmcv', 'mmcv', 'mmcv-lite', 'mmcv-full'),
    'mmseg': ('onedl-mmsegmentation', 'mmsegmentation'),
    'numpy': ('numpy',),
}


class Doctor:
    """Examines what this process sees. :func:`diagnose` prints it and compares the ranks.

    Args:
        args: Options of :func:`mapsage.commands.cli.build_parser`; ``config`` may be None.

    Attributes:
        launched: Whether a launcher started this process and its variables are complete.
        printing: Whether this rank prints; True in a single process.
        config: Config of the run; None without one that can be read.
        sections: Findings by the title of their section, in the order they are printed.
        accelerator: Accelerator that a training would use; None if there is none.
        device, card: Texts for this rank's device; ranks on the same card have the same ``card``.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.sections: Dict[str, List[Finding]] = {
            title: [] for title in ('installed', 'accelerators', 'strategy', 'environment')}
        self.env = EnvCfg(accelerator=args.accelerator or 'auto')
        self.config: Optional[Config] = None
        self.accelerator: Optional[Accelerator] = None
        self.device = 'no device'
        self.card: Optional[str] = None
        self.environ = dict(os.environ)  # as it was before stale variables are cleared
        self.printing = args.launcher == 'none' or self.environ.get('RANK', '0') == '0'
        self._trial = Trial()
        self._tried: Optional[Tuple[Config, nn.Module]] = None
        self._identified = self._identify()
        self.launched = self._identified and args.launcher != 'none'
        self.sections['installed'] = list(check_installed())
        needed_bytes = self._examine_config() if args.config else None
        self._choose_accelerator()
        if self.accelerator is None:
            self.sections['strategy'].append(Finding('no', 'not decided without an accelerator'))
        else:
            self._examine_strategy(self.accelerator, needed_bytes)
            self._time_steps(self.accelerator)
        self.sections['environment'] += check_environment(self.environ, self.accelerator,
                                                          args.launcher)
        if not self.sections['environment']:
            self.sections['environment'] = [Finding('ok', 'nothing that contradicts the run')]

    @property
    def problems(self) -> List[Finding]:
        """The findings that would keep a training from starting."""
        return [finding for findings in self.sections.values() for finding in findings
                if finding.level == 'problem']

    @property
    def joins(self) -> bool:
        """Whether this rank can enter a process group, with or without data to train on."""
        needed = self.sections['accelerators'] + self.sections['strategy']
        return self.launched and all(finding.level != 'problem' for finding in needed)

    def _identify(self) -> bool:
        """Clear or read the launcher's variables as the Runner does; return whether that works."""
        try:
            cleared = identify_process(self.args.launcher)
        except ValueError as error:
            self.sections['strategy'].append(Finding('problem', str(error)))
            return False
        if cleared:
            left = ', '.join(f'{name}={value}' for name, value in cleared.items())
            self.sections['environment'].append(Finding(
                'note', f'left over from another launcher, cleared by a run: {left}',
                f"unset {' '.join(cleared)}"))
        return True

    def _examine_config(self) -> Optional[int]:
        """Fill the section of the config and return what its model needs, where that is known."""
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
        findings += check_keys(cfg) if self.printing else []  # only rank 0 has trackers
        # Under a launcher the strategy does not depend on the model, so one rank examines it.
        return self._examine_model(cfg, findings) if self.printing else None

    def _examine_model(self, cfg: Config, findings: List[Finding]) -> Optional[int]:
        try:
            model = build_model(cfg)
        except ConfigError as error:
            findings.append(Finding('problem', str(error)))
            return None
        needed_bytes = estimate_training_bytes(model, cfg.get('optim_wrapper'))
        count = sum(parameter.numel() for parameter in model.parameters())
        findings.append(Finding(
            'ok', f'model {type(model).__name__}: {count:,} parameters, '
            f'{format_bytes(needed_bytes)} with gradients and optimizer state; activations come on '
            f'top'))
        findings += check_encoder_rate(cfg, model)
        found = {name: finding.level for finding in findings for name in LOADERS
                 if finding.text.startswith(f'{name}:')}
        for loader in LOADERS:
            if found.get(loader) == 'ok' and not any(
                    cfg.get(loader) == cfg.get(other) for other in LOADERS[:LOADERS.index(loader)]):
                findings += try_split(cfg, loader, model,
                                      self._trial if loader == 'train_dataloader' else None)
        self._tried = cfg, model
        return needed_bytes

    def _time_steps(self, accelerator: Accelerator) -> None:
        """Compare float32 and bfloat16, where a step on one device has succeeded."""
        split = any(finding.text.startswith(MODEL_PARALLEL)
                    for finding in self.sections['strategy'])
        if self._tried is None or not self._trial.samples or self.problems or split:
            return
        self.sections[f'config {self.args.config}'] += compare_precisions(
            *self._tried, self._trial.samples, self._trial.seconds, accelerator)

    def _choose_accelerator(self) -> None:
        findings = self.sections['accelerators']
        asked = self.env.accelerator
        try:
            self.accelerator = resolve_accelerator(asked)
            why = 'found by auto' if asked == 'auto' else 'chosen by name'
            findings.append(Finding('ok', f'{self.accelerator.describe()}: {why}'))
        except AcceleratorError as error:
            findings.append(Finding('problem', str(error)))
        for kind in ACCELERATORS:
            if self.accelerator is None or kind.name != self.accelerator.name:
                findings.append(Finding('no', f'{kind.name}: {_why_not(kind)}'))

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
                    self.env.use_model_parallel, os.environ, accelerator.device_count(),
                    launcher=self.args.launcher, needed_bytes=needed_bytes, device_bytes=memory)
                findings.append(Finding('ok', f'{strategy.name}: {strategy.reason}'))
            backend = resolve_backend(accelerator, self.env.backend)
            use = 'gradients and control traffic' if self.launched else 'not used by one process'
            findings.append(Finding('ok', f'backend {backend}: {use}'))
            self.device = str(accelerator.device(rank))
            self.card = card_identity(accelerator, rank)
        except (AcceleratorError, BackendError, StrategyError) as error:
            findings.append(Finding('problem', str(error)))
            return
        has = '' if memory is None else f', {format_bytes(memory)}'
        findings += [Finding('problem', text) for text in check_device(accelerator, rank)] or [
            Finding('ok', f'{self.device} allocates and computes{has}')]


def diagnose(args: argparse.Namespace,
             say: Callable[[str], None] = functools.partial(print, flush=True)) -> int:
    """Print the report and return the exit status: 0 when a training would start.

    Under a launcher every rank examines itself, rank 0 prints, and all test their collectives.

    Args:
        args: Options of :func:`mapsage.commands.cli.build_parser`; ``config`` may be None.
        say: Function that prints a part of the report.
    """
    doctor = Doctor(args)
    if doctor.printing:
        say(f'mapsage {__version__} doctor on {socket.gethostname()}')
        for title, findings in doctor.sections.items():
            say(_section(title, findings))
    ranks = Ranks() if doctor.launched else None
    found = doctor.problems
    if ranks is not None:
        about = ranks.compare(dict(
            host=socket.gethostname(), device=doctor.device, card=doctor.card, joins=doctor.joins,
            torch=torch.__version__, mapsage=__version__,
            problems=[finding.text for finding in found]))
        if doctor.printing:
            say(_section('ranks', about))
        tested = [Finding('no', 'not tested: not every rank has a device and a strategy')]
        if ranks.all_join and doctor.accelerator is not None:
            tested = ranks.try_collectives(doctor.accelerator, doctor.env)
        found += about + tested
    else:
        tested = [Finding('no', 'not tested in one process',
                          f'{script("doctor")} [CONFIG] tests those of NPROC_PER_NODE ranks')]
    built = _try_run(doctor, ranks, all(finding.level != 'problem' for finding in found))
    found += built
    problems = {finding.text for finding in found if finding.level == 'problem'}
    well = not problems and (ranks is None or ranks.all_join)
    if doctor.printing:
        say(_section('collectives', tested))
        if built:
            say(_section('run', built))
        say('\nresult: ' + ('training would start' if well else
                            f'training would not start, {len(problems)} problem(s)'))
        if not well:
            note_for_launcher(f'doctor: {len(problems)} problem(s), see its report above')
    if ranks is not None:
        ranks.wait_for_print()
    return 0 if well else 1


def _try_run(doctor: Doctor, ranks: Optional[Ranks], well: bool) -> List[Finding]:
    """Build the run of the config, where all is well until now. Collective under a launcher."""
    if ranks is not None:
        return ranks.try_run(doctor.config, well) if ranks.all_join else []
    if doctor.config is None or not well:
        return []
    obstacle = run_obstacle(doctor.config)
    return [Finding('ok', RUN_IS_BUILT) if obstacle is None else
            Finding('problem', f'the run cannot be built: {obstacle}')]


def check_installed() -> Iterator[Finding]:
    """Yield findings about packages: installed, missing, or installed twice."""
    yield Finding('ok', f'python {platform.python_version()} on {platform.platform()}')
    for module, distributions in _DISTRIBUTIONS.items():
        versions = _versions(distributions)
        found = ', '.join(f'{name} {version}' for name, version in versions.items())
        if len(versions) > 1:
            yield Finding('problem', f'{found}: each brings the module {module}',
                          'pip uninstall all of them, then install one (requirements.txt)')
        elif versions or importlib.util.find_spec(module):
            yield Finding('ok', found or f'{module}, not from a package')
        else:
            yield Finding('problem', f'{module} is not installed', 'bash scripts/setup_env.sh, or '
                          f'pip install {distributions[0]}')
    for vendor in VENDOR_MODULES:
        if importlib.util.find_spec(vendor) is None:
            yield Finding('no', f'{vendor} is not installed')
        else:
            version = next(iter(_versions((vendor,)).values()), 'of unknown version')
            yield Finding('ok', f'{vendor} {version}')


def _versions(distributions: Tuple[str, ...]) -> Dict[str, str]:
    found: Dict[str, str] = {}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _why_not(kind: Any) -> str:
    try:
        reason = why_not(kind)
    except AcceleratorError as error:
        return str(error)
    if reason is None:
        return 'usable, by name only: simulated' if kind.simulated else 'usable, not chosen'
    return reason


def _section(title: str, findings: List[Finding]) -> str:
    return '\n'.join(['', title, *map(str, findings)])
