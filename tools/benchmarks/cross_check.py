"""Inject faults into a training with `env_cfg.cross_check`, and count which of them are found.

    OMP_NUM_THREADS=1 python tools/benchmarks/cross_check.py [--faults 1000] [--clean 10000]
        [--overhead-steps 60]

Two and three ranks train the tests' toy model on the CPU, half of the faults each. A fault flips
bits in the results of one rank's matrix products, or in its weights; it begins at a random
iteration and lasts until a check has raised its error or the time is over. Then the weights are as
before, and the next fault begins. A fault counts as found if all ranks raise the error within an
interval, and as named if the error names the faulty rank alone (of two ranks: both). The clean run
checks every step. The overhead is the processor time of a checked step of FCN on ResNet-18 (4
images of 128x128) above the other ranks', divided by 200 steps. The exit status is 1 if a fault
that must be found was not, if there was a false alarm, or if the overhead is above 1 %.
"""

import argparse
import copy
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests'), str(ROOT / 'tools' / 'benchmarks')]

import torch  # noqa: E402
from _common import describe_machine, fork_ranks, write_tiles  # noqa: E402
from faulty_card import FaultyCard, flip_bit  # noqa: E402
from mmengine.config import Config  # noqa: E402
from mmengine.hooks import Hook  # noqa: E402
from toy_runs import toy_train  # noqa: E402

import mapsage  # noqa: E402, F401
from mapsage.engine import MapSageRunner  # noqa: E402
from mapsage.extras.forensics.cross_check_hook import CrossCheckError, CrossCheckHook  # noqa: E402

K = 4
# Kinds of faults, and whether a check must find them.
KINDS = {
    'forward pass, all kernels, from one step on': True,
    'backward pass, all kernels, from one step on': True,
    'optimizer of one rank, from one step on': True,
    'one bit of a weight in the memory of one rank': True,
    'one bit in the forward pass of a checked step': True,
    'one bit in the backward pass of a checked step': True,
    'one bit in a recomputation': True,
    'forward pass, one kernel call of five, from one step on': False,
    'one bit in the forward pass of a step that is not checked': False,
}


class Fault(NamedTuple):
    """A fault: its kind, the faulty rank, the steps into its trial, and what it flips."""

    kind: str
    rank: int
    offset: int
    element: int
    bit: int


def draw_faults(count: int, world: int, seed: int) -> List[Fault]:
    """Return faults of all kinds in turns, with high bits of numbers that are not exponents' first."""
    numbers = random.Random(seed)
    kinds = list(KINDS)
    return [
        Fault(
            kinds[i % len(kinds)],
            numbers.randrange(world),
            numbers.randrange(K),
            numbers.randrange(10**6),
            numbers.choice(range(12, 30)),
        )
        for i in range(count)
    ]


class Trials(CrossCheckHook):
    """Checks as env_cfg.cross_check does, writes errors down and trains on."""

    def __init__(self, interval: int, faults: List[Fault]) -> None:
        super().__init__(interval)
        self.faults = faults
        self.found: Dict[int, List[Any]] = {}
        self.card = FaultyCard()
        self.numbers = random.Random(1)
        self.step = False
        self.alarms: List[str] = []
        # Numbers of the faults that changed no gradient of a check on this rank.
        self.harmless: List[int] = []
        self._recomputed: Any = None
        self._start: Any = None

    def _trial(self, runner: Any) -> Any:
        """Return number and fault of the trial of this iteration, and the iteration in it."""
        # The first K iterations are without a fault: their check measures.
        number, inside = divmod(runner.iter - K, 2 * K)
        return (number, self.faults[number], inside) if 0 <= number < len(self.faults) else None

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        super().before_train_iter(runner, batch_idx, data_batch)
        trial = self._trial(runner)
        self.step = True
        if trial is None:
            return
        number, fault, inside = trial
        if inside == 0:
            self._start = [
                copy.deepcopy(part.state_dict())
                for part in (runner.model, runner.optim_wrapper.optimizer)
            ]
        # Checked steps are the K-th ones; others can be told by their offset.
        checked = K - 1
        begins = {'checked': checked, 'recomputation': checked}.get(
            next(
                (
                    word
                    for word in ('checked', 'recomputation')
                    if word in fault.kind and 'not checked' not in fault.kind
                ),
                '',
            ),
            fault.offset,
        )
        if 'not checked' in fault.kind:
            begins = fault.offset % (K - 1)
        if runner.rank != fault.rank or inside != begins:
            return
        stage = 'backward' if 'backward' in fault.kind else 'forward'
        if 'weight' in fault.kind:
            flip_bit(next(runner.model.parameters()).data, fault.element, fault.bit)
        elif 'recomputation' in fault.kind:
            self.card.break_down(
                'forward', fault.element, fault.bit, once=True, when=lambda: not self.step
            )
        elif 'one kernel call' in fault.kind:
            self.card.break_down(
                stage, fault.element, fault.bit, when=lambda: self.numbers.random() < 0.2
            )
        elif 'optimizer' not in fault.kind:
            self.card.break_down(stage, fault.element, fault.bit, once='one bit' in fault.kind)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.step = False
        trial, checked = self._trial(runner), self._recording
        if (
            trial is not None
            and 'optimizer' in trial[1].kind
            and runner.rank == trial[1].rank
            and trial[2] >= trial[1].offset
        ):
            # Another number in each step, so that no flip takes back an earlier one.
            flip_bit(
                next(runner.model.parameters()).data,
                trial[1].element + runner.iter,
                trial[1].bit % 8,
            )
        try:
            super().after_train_iter(runner, batch_idx, data_batch, outputs)
        except CrossCheckError as error:
            if trial is None:
                self.alarms.append(str(error))
            else:
                self.found.setdefault(trial[0], [trial[2], sorted(error.problems)])
        else:
            if checked and trial is not None and self._numbers_are_right():
                self.harmless.append(trial[0])
        if trial is not None and trial[2] == 2 * K - 1:
            self.card.mend()
            runner.model.load_state_dict(self._start[0])
            runner.optim_wrapper.optimizer.load_state_dict(self._start[1])

    def _recompute(self, inputs: Any, before_step: bool) -> Any:
        self._recomputed = inputs, before_step, super()._recompute(inputs, before_step)
        return self._recomputed[-1]

    def _numbers_are_right(self) -> bool:
        """Return whether the gradients of the last check are a sound card's."""
        assert self._capture is not None
        inputs, before_step, checked = self._recomputed
        with self.card.mended():
            return self._capture.print == super()._recompute(
                self._inputs(), True
            ) and checked == super()._recompute(inputs, before_step)


def train(folder: Path, hook: Trials, steps: int) -> None:
    """Train the toy model on this rank."""
    toy_train(
        folder,
        hooks=[hook],
        **{
            'train_dataloader.batch_size': 8,
            'train_cfg.max_iters': steps,
            'train_cfg.val_interval': 10**9,
            'default_hooks.checkpoint': None,
            'default_hooks.non_finite_loss': None,
            'default_hooks.logger.interval': 10**9,
            'default_hooks.report': None,
            'default_hooks.progress_bar': None,
            'default_hooks.preview': None,
        },
    )


def on_ranks(world: int, folder: Path, work: Any) -> List[Any]:
    """Return what ``work(rank)`` returns on each of ``world`` forked ranks."""
    folder.mkdir(parents=True)

    def be_rank(rank: int, world: int, port: int) -> None:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR='127.0.0.1',
            MASTER_PORT=str(port),
        )
        with open(folder / f'{rank}.log', 'w') as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        try:
            (folder / f'{rank}.json').write_text(json.dumps(work(rank)))
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    fork_ranks(world, be_rank)
    return [json.loads((folder / f'{rank}.json').read_text()) for rank in range(world)]


def run_faults(folder: Path, world: int, faults: List[Fault]) -> Dict[str, List[int]]:
    """Return by kind how many faults there were, were found, and were found with the right rank."""

    def work(rank: int) -> Any:
        hook = Trials(K, faults)
        train(folder / 'work', hook, K + 2 * K * len(faults))
        return [
            {str(number): value for number, value in hook.found.items()},
            hook.alarms,
            hook.harmless,
        ]

    answers = on_ranks(world, folder, work)
    found, alarms, _ = answers[0]
    assert not alarms, alarms
    assert all(answer[0] == found for answer in answers), 'the ranks raised different errors'
    table = {kind: [0, 0, 0] for kind in KINDS}
    for number, fault in enumerate(faults):
        inside, named = found.get(str(number), (None, []))
        row = table[fault.kind]
        in_step = 'in the' in fault.kind or 'in a' in fault.kind
        if KINDS[fault.kind] and in_step and inside is None and number in answers[fault.rank][2]:
            # The number that was flipped is one that dropout or ReLU drops.
            continue
        row[0] += 1
        # A check compares the weights before its step, so that it finds a change in a later step.
        in_weights = 'weight' in fault.kind or 'optimizer' in fault.kind
        in_time = inside is not None and inside < fault.offset + K + in_weights
        row[1] += in_time
        row[2] += in_time and named == ([fault.rank] if world > 2 else [0, 1])
    return table


def run_clean(folder: Path, world: int, steps: int) -> List[str]:
    """Return the false alarms of a sound run that checks every step."""

    def work(rank: int) -> Any:
        hook = Trials(1, [])
        train(folder / 'work', hook, steps)
        return hook.alarms

    return [alarm for alarms in on_ranks(world, folder, work) for alarm in alarms]


class StepTimes(Hook):
    """Processor seconds of this process from one step to the next."""

    priority = 'LOWEST'

    def __init__(self) -> None:
        self.seconds: List[float] = []
        self._last = 0.0

    def before_train(self, runner: Any) -> None:
        self._last = time.process_time()

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        now = time.process_time()
        self.seconds.append(now - self._last)
        self._last = now


def measure_overhead(folder: Path, steps: int) -> List[float]:
    """Return the processor seconds of a step, and those that a check adds, on rank 0 of two."""
    interval = 5
    data = write_tiles(folder / 'data')

    def work(rank: int) -> Any:
        cfg = Config.fromstring((ROOT / 'tools' / 'benchmarks' / 'fcn_r18.py').read_text(), '.py')
        cfg.train_dataloader.dataset.data_root = str(data)
        cfg.train_cfg.max_iters, cfg.work_dir = steps, str(folder / 'work')
        cfg.env_cfg = dict(accelerator='cpu', cross_check=dict(interval=interval))
        cfg.launcher, cfg.experiment_name = 'pytorch', f'overhead{os.getpid()}'
        runner = MapSageRunner.from_cfg(cfg)
        times = StepTimes()
        runner.register_hook(times)
        runner.train()
        return times.seconds

    seconds = on_ranks(2, folder / 'ranks', work)[0][interval:]
    checked = seconds[interval - 1 :: interval]
    others = [value for number, value in enumerate(seconds, 1) if number % interval]
    return [statistics.median(others), statistics.median(checked) - statistics.median(others)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--faults', type=int, default=1000)
    parser.add_argument('--clean', type=int, default=10000)
    parser.add_argument('--overhead-steps', type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(describe_machine())
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.faults:
            print(
                f'K = {K}; 2 and 3 ranks: found within K steps, and named rightly, of the faults '
                f'that changed a number'
            )
            tables = [
                run_faults(
                    folder / f'faults{world}',
                    world,
                    draw_faults(args.faults // 2, world, seed=world),
                )
                for world in (2, 3)
            ]
            for kind, must in KINDS.items():
                rows = [table[kind] for table in tables]
                failed |= must and any(count != row[0] for row in rows for count in row)
                cells = '  '.join(f'{row[1]:>4} {row[2]:>4} of {row[0]:<4}' for row in rows)
                print(f'{kind:<60}{cells}')
        if args.clean:
            alarms = run_clean(folder / 'clean', 2, args.clean)
            failed |= bool(alarms)
            print(f'{args.clean} clean steps, each checked: {len(alarms)} false alarm(s)')
        if args.overhead_steps:
            step, check = measure_overhead(folder / 'overhead', args.overhead_steps)
            failed |= check > 0.01 * 200 * step
            print(
                f'processor time: step {1000 * step:.0f} ms, check {1000 * check:.0f} ms: '
                f'{check / (200 * step):.2%} with interval=200'
            )
    sys.exit(int(failed))


if __name__ == '__main__':
    main()
