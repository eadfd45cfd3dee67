"""The report of `mapsage tune CONFIG`: table, choice, and the line to type.

Threads are compared first, then all combinations of the options under the chosen threads. Loader
workers come last, since they have to feed the faster step.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm

from mapsage.accelerator import Accelerator, resolve_accelerator, set_current_accelerator
from mapsage.commands.cli import build_model, read_config
from mapsage.commands.doctor.config import check_data
from mapsage.distributed import error_text
from mapsage.distributed.wrappers import place_module
from mapsage.distributed.wrappers.fused import with_default_fusion
from mapsage.engine.compiled_parts import compile_parts
from mapsage.engine.config import explain_config_error
from mapsage.engine.env_cfg import ConfigError, parse_env_cfg
from mapsage.engine.extensions.fast import is_convolutional
from mapsage_launcher.shipped import program

from .bench import StepBench, Visit
from .options import Option, Variant, combine, compile_option, step_options
from .race import Race
from .table import command_line, format_rows, format_workers
from .workers import TrainingData, candidate_workers, visit_with_workers, workers_option

# Seconds of the whole command, and the least that is left to the measurement.
BUDGET, LEAST_BUDGET = 115.0, 60.0
# Seconds of --compile after its first visit, in which the compiler works.
_COMPILE_BUDGET = 40.0
# Shares of the budget at whose end the threads, the options and the confirmation of the choice
# are measured. Workers have the rest.
_THREADS_END, _OPTIONS_END, _CONFIRMED = 0.2, 0.7, 0.82
# Fewest steps that compare one option twice: two rounds of three visits of two steps.
_LEAST_STEPS = 12
# Elapsed time in processor times of the main thread, above which others use the machine.
_BUSY = 1.25
# A loader that takes a smaller share of a step cannot gain more by workers.
_LOADING_MATTERS = 0.03

Say = Callable[[str], None]


def tune(args: argparse.Namespace, say: Say = print) -> int:
    """Measure the options of a training step and print which to use; return the status.

    Args:
        args: Options of `tune.py`.
        say: Prints a text.

    Raises:
        ConfigError: If the config cannot be read, its step fails, or too few steps fit the time.
        DataError: If the training data cannot be read.
    """
    start = time.perf_counter()
    budget = max(LEAST_BUDGET, BUDGET - process_age())
    if args.launcher != 'none':
        raise ConfigError(
            f'a tuning is measured in one process, and --launcher {args.launcher} starts '
            f'several. Run {program("tune")} CONFIG.'
        )
    cfg = read_config(args)
    env = parse_env_cfg(cfg.get('env_cfg') or {}, cfg.get('model_wrapper_cfg'))
    accelerator = set_current_accelerator(resolve_accelerator(env.accelerator))
    if accelerator.lazy:
        raise ConfigError(
            f'a tuning compares steps one by one, and {accelerator.name} records and '
            f'compiles whole graphs. Choose another --accelerator.'
        )
    missing = [finding for finding in check_data(_training_only(cfg)) if finding.level == 'problem']
    if missing:
        for finding in missing:
            say(str(finding))
        say('result: nothing was measured, since the training data are not there')
        return 1
    with _same_random_numbers(), warnings.catch_warnings():
        # The run shows these warnings.
        warnings.simplefilter('ignore')
        accelerator.set_device(0)
        accelerator.set_float32_precision(env.float32_matmul_precision, env.cudnn_allow_tf32)
        if (cfg.get('env_cfg') or {}).get('cudnn_benchmark'):
            torch.backends.cudnn.benchmark = True
        Tuning(args, cfg, accelerator, start, budget, say).run()
    return 0


class Tuning:
    """The measurement of one config.

    Args:
        args: Options of `tune.py`.
        cfg: Complete config, whose training data exist.
        accelerator: Accelerator in force.
        start: Time of ``time.perf_counter`` at which the measurement began.
        budget: Seconds that it may take.
        say: Prints a text.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        cfg: Config,
        accelerator: Accelerator,
        start: float,
        budget: float,
        say: Say,
    ) -> None:
        self._args, self._cfg, self._accelerator = args, cfg, accelerator
        self._deadline, self._budget, self._say = start + budget, budget, say
        self._data = TrainingData(cfg)
        batch = self._data.load()[0]
        model = place_module(revert_sync_batchnorm(build_model(cfg)), accelerator, 0)
        environment = dict(cfg.get('env_cfg') or {})
        if accelerator.fast_by_default and environment.get('fast') is not False:
            # A training has these settings too, and the options are against them.
            environment.setdefault('channels_last', is_convolutional(model))
            cfg.env_cfg = environment
            cfg.optim_wrapper = with_default_fusion(cfg.optim_wrapper, accelerator)
        self.bench = StepBench(cfg, model, batch, accelerator)
        self.base = Variant((), torch.get_num_threads())

    def run(self) -> None:
        """Measure, and print the tables and the result."""
        self._measure_step()
        options = step_options(self._cfg, self.bench.model, self._accelerator)
        base = self._choose_threads()
        race, chosen = self.choose_options(options, base)
        gain = None if chosen is None else race.standings[chosen].speed
        best = chosen or base
        if self._args.compile:
            best = self._try_compile(best)
        best = self._choose_workers(best)
        if self._accelerator.simulated:
            self._say(
                f'\nresult: none, since {self._accelerator.name} is simulated, and its times '
                f'say nothing about a card'
            )
            return
        self._say('\n' + command_line(self._args, self.base, best, gain, race.noise))

    def _measure_step(self) -> None:
        """Time the step as configured, and print what is measured.

        Raises:
            ConfigError: If the step fails, or the time holds too few of them.
        """
        try:
            visit = self.bench.calibrate(self.base)
        # A user's model may raise anything.
        except Exception as error:
            raise ConfigError(
                f'a training step of the config as it is fails on {self._accelerator.name}: '
                f'{error_text(explain_config_error(error))}'
            ) from error
        seconds = self.bench.seconds
        size = self._cfg.train_dataloader.get('batch_size') or 1
        left = self._deadline - time.perf_counter()
        self._say(
            f'tuning {self._args.config} on {self._accelerator.describe()}: a training step '
            f'of {size} image(s) takes {1000 * seconds:.0f} ms, loading its batch '
            f'{1000 * self._data.load_seconds:.0f} ms'
        )
        if visit.elapsed > _BUSY * visit.seconds:
            self._say(
                f'note: other processes use this machine: a step takes '
                f'{visit.elapsed / visit.seconds:.1f} times its processor time. Threads and '
                f'workers are compared under that load'
            )
        if self._data.left_out:
            self._say('note: fast_copy is left out, because making the copies takes longer')
        if self._cfg.get('compile'):
            self._say('note: compile of the config is left out; --compile measures it')
        if _LEAST_STEPS * seconds > left * _OPTIONS_END:
            fitting = max(1, int(size * left * _OPTIONS_END / 30 / seconds))
            raise ConfigError(
                f'a training step takes {seconds:.1f} s here, and the two minutes of a tuning hold '
                f'{int(left / seconds)} of them: too few to tell a gain from noise. Measure a '
                f'smaller batch: --cfg-options train_dataloader.batch_size={fitting}'
            )

    def _choose_threads(self) -> Variant:
        """Print the table of thread counts; return the config as it is with the best of them."""
        numbers = thread_counts(self.base.threads, _cores())
        if self._accelerator.device_type != 'cpu':
            self._say(f'\nthreads: not measured, {self._accelerator.name} computes the step')
            return self.base
        if not numbers:
            self._say('\nthreads: one processor core, nothing to choose')
            return self.base
        race = Race(self._visit_by_clock, self.base)
        variants = [Variant((), threads) for threads in numbers]
        race.run(variants, self._until(_THREADS_END), rounds=5)
        self._say('')
        for line in format_rows(
            race,
            'threads',
            {
                self.base: f'{self.base.threads} (now)',
                **{variant: str(variant.threads) for variant in variants},
            },
        ):
            self._say(line)
        return race.choose() or self.base

    def _visit_by_clock(self, variant: Variant) -> Visit:
        """Visit a variant; its time is the elapsed time, as more threads share the work."""
        visit = self.bench.visit(variant)
        return replace(visit, seconds=visit.elapsed)

    def choose_options(
        self, options: Sequence[Option], base: Variant
    ) -> Tuple[Race, Optional[Variant]]:
        """Print the table of the combinations of options.

        Args:
            options: Options, also those that cannot be tried.
            base: The config as it is, with the chosen threads.

        Returns:
            Race of the options, and the combination to use; None for none.
        """
        race = Race(self.bench.visit, base)
        variants = combine(options, base.threads)
        race.run(variants[: self._affordable()], self._until(_OPTIONS_END))
        obstacles = {
            option.name: f'not possible: {option.obstacle}' for option in options if option.obstacle
        }
        self._say('')
        for line in format_rows(
            race,
            'options',
            {base: base.name, **{variant: variant.name for variant in variants}},
            obstacles,
        ):
            self._say(line)
        chosen = race.choose()
        if chosen is None:
            return race, None
        # More rounds, because the best of many measurements looks better than it is.
        race.run([chosen], self._until(_CONFIRMED))
        speed = race.standings[chosen].speed
        self._say(
            f'  {chosen.name}, in all rounds and some more: {speed.gain:.2f} times as fast, '
            f'spread {speed.spread:.2f}, noise {race.noise:.2f}'
        )
        return race, chosen if race.gains(chosen) else None

    def _affordable(self) -> int:
        """Return how many variants can be visited twice in the time of the options."""
        left = self._until(_OPTIONS_END) - time.perf_counter()
        visit = (self.bench.steps + 1) * self.bench.seconds
        return max(1, int(left / 2 / visit) - 2)

    def _try_compile(self, best: Variant) -> Variant:
        """Print how a compiled step compares; return the variant to use."""
        option = compile_option(self.bench.model, self._accelerator)
        compiled = replace(best, options=(*best.options, option))
        if option.obstacle:
            self._say(f'\n  compile: not possible: {option.obstacle}')
            return best
        # Compiled methods cannot be taken off a model.
        model = copy.deepcopy(self.bench.model)
        bench = StepBench(self._cfg, model, self.bench.batch, self._accelerator)
        compile_parts(model, {key.split('.', 1)[1]: True for key, _ in option.changes})
        bench.steps, bench.seconds = self.bench.steps, self.bench.seconds
        start = time.perf_counter()
        try:
            bench.visit(compiled)
        # The compiler may raise anything.
        except Exception as error:
            self._say(f'\n  compile: fails: {error_text(error).strip().splitlines()[0]}')
            return best
        warm_up = time.perf_counter() - start
        race = Race(
            lambda variant: (bench if variant == compiled else self.bench).visit(variant), best
        )
        race.run([compiled], time.perf_counter() + _COMPILE_BUDGET, rounds=6)
        # The compiler's time does not count against what is measured after it.
        self._deadline += time.perf_counter() - start
        self._say('')
        for line in format_rows(race, 'compile', {best: best.name, compiled: compiled.name}):
            self._say(line)
        self._say(f'  the first steps took {warm_up:.0f} s, which a run spends at every start')
        return race.choose() or best

    def _choose_workers(self, best: Variant) -> Variant:
        """Print the table of loader workers; return the variant to use."""
        data, configured = self._data, self._data.workers
        base = replace(best, workers=configured)
        seconds = min(self.bench.visit(_without_compile(best)).elapsed, self.bench.seconds)
        share = data.load_seconds / (data.load_seconds + seconds)
        if share < _LOADING_MATTERS:
            self._say(
                f'\nworkers: loading a batch takes {1000 * data.load_seconds:.1f} ms of '
                f'processor time in one process, {share:.1%} of a step: their number cannot '
                f'matter here'
            )
            return best
        numbers = candidate_workers(configured, data.load_seconds, seconds, _cores())
        race = Race(
            lambda variant: visit_with_workers(self.bench, data, _without_compile(variant)), base
        )
        race.run([replace(best, workers=number) for number in numbers], self._deadline, rounds=4)
        self._say('')
        for line in format_workers(race, configured):
            self._say(line)
        chosen = race.choose()
        if chosen is None or chosen.workers is None:
            return best
        return replace(
            best,
            options=(*best.options, workers_option(self._cfg.train_dataloader, chosen.workers)),
        )

    def _until(self, share: float) -> float:
        """Return the time at which a share of the budget is used up."""
        return self._deadline - (1 - share) * self._budget


def thread_counts(now: int, cores: int) -> List[int]:
    """Return the numbers of threads to compare with the present one, the largest first. Pure.

    Example:
        >>> thread_counts(4, 6)
        [6, 2, 1]
    """
    numbers = {cores, *(1 << power for power in range(cores.bit_length()))}
    return sorted((number for number in numbers if number <= cores and number != now), reverse=True)


def _without_compile(variant: Variant) -> Variant:
    return replace(
        variant, options=tuple(option for option in variant.options if option.name != 'compile')
    )


def _training_only(cfg: Config) -> Config:
    loader: Optional[Mapping[str, Any]] = cfg.get('train_dataloader')
    if (
        not isinstance(loader, Mapping)
        or not isinstance(loader.get('dataset'), Mapping)
        or not isinstance(cfg.get('optim_wrapper'), Mapping)
    ):
        raise ConfigError(
            'a tuning needs a train_dataloader with the config of a dataset, and an '
            'optim_wrapper, and the config lacks one of them.'
        )
    if not isinstance(cfg.optim_wrapper.get('optimizer'), Mapping):
        raise ConfigError(
            'a tuning needs optim_wrapper.optimizer, the config of one optimizer, got '
            f'{cfg.optim_wrapper.get("optimizer")!r}.'
        )
    return Config(dict(train_dataloader=cfg.train_dataloader))


def process_age() -> float:
    """Return the seconds since this process started; 0 where the system does not tell (Linux)."""
    try:
        fields = Path('/proc/self/stat').read_text().rsplit(')', 1)[1].split()
        # starttime, field 22 of proc(5), counts clock ticks since the boot.
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf('SC_CLK_TCK')
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


def _cores() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, 'sched_getaffinity'):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's generators at the end of the block."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
