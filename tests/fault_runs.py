"""Launched trainings that break once, at random: what is drawn, how it runs, what must hold then.

    OMP_NUM_THREADS=1 python tests/fault_runs.py --count 200 --jobs 3 --out faults
    OMP_NUM_THREADS=1 python tests/fault_runs.py --seed 17

A fault follows from its seed. ``--out`` is a folder for the table and for the output of each
run that did not end as it must.
"""
from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / 'distributed'), str(HERE.parent)]

import torch  # noqa: E402
from frozen_config import PLAIN  # noqa: E402
from support import TINY_CONFIG, Finished, Launch, launch, write_tiny_data  # noqa: E402
from warm_python import warm_python  # noqa: E402

import mapsage  # noqa: E402, F401  (closes the hosts' gaps)
from mapsage.engine.checkpoints.resume import ResumeError, choose_checkpoint  # noqa: E402

_one_loads = threading.Lock()  # torch keeps the types that a file may hold for the whole process

STEPS, EVERY = 8, 2  # steps of a run, and from one checkpoint to the next
TIMEOUT = 12  # seconds, of the config: how long a rank may be late
# Seconds from the start of a run to its end: it waits for TIMEOUT at the start or in the step, and
# torchrun gives a stopped process 30 s to end. The rest is for a machine that does other work too.
DEADLINE = 150.0

KINDS = {  # kind: places
    'kill': ['start', 'hook before the step', 'hook after the step', 'transform', 'forward',
             'validation', 'save', 'moment', 'moment'],
    'exception': ['start', 'hook before the step', 'hook after the step', 'transform', 'forward',
                  'validation', 'save', 'optimizer'],
    'nan': ['loss', 'gradient', 'weight'],
    'stall': ['start', 'hook before the step', 'hook after the step', 'transform', 'forward',
              'validation', 'optimizer'],
}
SOURCES = [None, None, 'Local', 'Prefetched', 'Cached', 'Streamed', 'Streamed']

CONFIG = '''
custom_imports = dict(imports=['mapsage', 'planted_faults'])
env_cfg = dict(accelerator='cpu', dist_cfg=dict(timeout={timeout}))
train_pipeline.insert(-1, dict(type='PlantedTransform'))
train_dataloader.update(num_workers={workers}, persistent_workers={persistent})
default_hooks['checkpoint'] = dict(type='CheckpointHook', max_keep_ckpts=1, **{checkpoint})
custom_hooks = [*{sampling}, dict(type='PlantedFault'), dict(type='CheckpointWitness')]
param_scheduler = None
'''
FROZEN = PLAIN + "model['backbone']['type'] = 'PlantedViT'\nfeature_source = {source}\n"
LOOPS = {
    'iterations': 'train_cfg.update(max_iters={steps}, val_interval=4)\n',
    'epochs': '''
train_dataloader['sampler'] = dict(type='DefaultSampler', shuffle=True)
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs={epochs}, val_interval={val})
''',
}
SAMPLING = {
    'none': [], 'plain': [dict(type='DynamicSamplingHook', score=dict(type='LabelScore'),
                               validity=dict(low=0.45), max_age=2)]}
SAMPLING['prefetch'] = [dict(SAMPLING['plain'][0], prefetch=True)]


@dataclass
class Fault:
    """A run and what breaks in it."""

    seed: int
    kind: str
    place: str
    rank: int
    step: int
    ranks: int
    encoders: int = 0
    source: Optional[str] = None
    fallback: bool = True  # whether heads may encode
    loop: str = 'iterations'
    by_epoch: bool = False  # whether checkpoints are written at the end of epochs
    sampling: str = 'none'
    workers: int = 0
    batch: int = 2
    again: bool = False  # whether each later item or sample fails too
    delay: float = 0.0  # seconds behind the begin of the step, for the place 'moment'
    how: str = ''  # how it is killed
    cold: bool = False  # whether the launcher starts from nothing
    resume: bool = False  # whether the run is resumed afterward

    @property
    def heads(self) -> int:
        return self.ranks - self.encoders

    def __str__(self) -> str:
        drawn = {name: value for name, value in asdict(self).items()
                 if value and name not in ('seed', 'kind', 'place', 'rank', 'ranks', 'batch')}
        return (f'seed {self.seed}: {self.kind} in {self.place} on rank {self.rank} of '
                f'{self.ranks}, ' + ', '.join(f'{k}={v}' for k, v in drawn.items()))


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        cause: What the launcher printed at last; empty if the run succeeded.
        seconds: From the fault to the end; None if the run had ended before.
        wrong: What does not hold; empty for a good end.
    """

    fault: Fault
    status: Optional[int] = None
    cause: str = ''
    seconds: Optional[float] = None
    whole: float = 0.0
    wrong: List[str] = field(default_factory=list)
    output: str = ''

    @property
    def result(self) -> str:
        if self.wrong:
            return 'WRONG'
        return 'went on' if self.status == 0 else 'ended by name'

    def __str__(self) -> str:
        when = 'no fault' if self.seconds is None else f'{self.seconds:.1f} s after it'
        cause = ' | '.join(line.strip() for line in self.cause.splitlines() if line.strip())
        return '\n'.join([f'{self.fault}\n    {self.result}, {self.whole:.1f} s, {when}: '
                          f'{cause[:300] or "no error"}',
                          *(f'    WRONG: {each}' for each in self.wrong)])


def draw(seed: int) -> Fault:
    """Return the fault of a seed; four seeds in a row have all four kinds."""
    dice = random.Random(seed)
    kind = list(KINDS)[seed % len(KINDS)]
    fault = Fault(seed, kind, dice.choice(KINDS[kind]), 0, dice.randrange(STEPS),
                  dice.randint(2, 5), source=dice.choice(SOURCES), workers=dice.randrange(2),
                  loop=dice.choice(list(LOOPS)), resume=dice.random() < 0.25,
                  cold=dice.random() < 0.1)
    fault.by_epoch = fault.loop == 'epochs' and dice.random() < 0.5
    if fault.source == 'Streamed':
        fault.encoders = 2 if fault.ranks > 3 and dice.random() < 0.4 else 1
        fault.fallback = dice.random() < 0.7
    elif fault.source != 'Prefetched':  # these two work ahead of the step, and sampling does not
        fault.sampling = dice.choice(list(SAMPLING) if fault.workers else ['none', 'plain'])
    fault.rank = dice.randrange(fault.heads)
    if fault.encoders and dice.random() < 0.6:
        fault.place, fault.step, fault.again = 'encoder', dice.randrange(3), dice.random() < 0.5
        fault.rank = dice.randrange(fault.heads, fault.ranks)
    elif fault.heads == 1 and fault.kind == 'stall':  # nobody waits for the only rank
        fault.ranks += 1
    if fault.kind == 'stall' and dice.random() < 0.25:
        fault.kind = 'stop'
    if kind == 'exception' and fault.place == 'transform':
        fault.again = True  # as a broken file is: 'Cached' tries some samples before the run
    if kind == 'kill':
        fault.how = dice.choice(['SIGKILL', 'SIGKILL', 'SIGSEGV', 'exit'])
    if fault.place == 'save':  # only rank 0 writes
        fault.rank = 0
    if fault.place == 'moment':
        fault.delay = round(dice.random() * 0.5, 3)
    return fault


def config_of(fault: Fault, data: Path, cache: Path) -> str:
    """Return the text of the run's config."""
    epoch = -(-16 // (2 * fault.heads))  # steps
    text = TINY_CONFIG.replace('{data_root!r}', repr(str(data))) + CONFIG.format(
        timeout=TIMEOUT, workers=fault.workers, persistent=bool(fault.workers),
        sampling=SAMPLING[fault.sampling],
        checkpoint=dict(by_epoch=True, interval=-(-EVERY // epoch)) if fault.by_epoch
        else dict(by_epoch=False, interval=EVERY))
    text += LOOPS[fault.loop].format(steps=STEPS, epochs=-(-STEPS // epoch), val=-(-4 // epoch))
    if fault.source:
        source: Dict[str, Any] = dict(type=fault.source)
        if fault.source == 'Cached':
            source['folder'] = str(cache)
        if fault.source == 'Streamed':
            # shorter than the others wait for a head that waits for an encoder
            source.update(encoders=fault.encoders, timeout=TIMEOUT / 2, peer_timeout=TIMEOUT / 2,
                          local_fallback=fault.fallback)
        text += FROZEN.format(source=source)
    return text


class FaultRuns:
    """Runs faults in folders of their own.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = write_tiny_data(folder / 'data')
        self._cache = folder / 'cache'
        self._environ = {'PYTHONPATH': str(HERE / 'distributed')}
        warm_python()  # in the main thread, with which the server ends

    def make_cache(self) -> None:
        """Compute the features for sources of type 'Cached'."""
        path = self._folder / 'cached.py'
        path.write_text(config_of(Fault(0, '', '', 0, 0, 2, source='Cached'), self._data,
                                  self._cache))
        made = launch(path, '--folder', self._cache, '--accelerator', 'cpu',
                      command=[sys.executable, 'tools/cache_features.py'], environ=self._environ)
        assert made.status == 0, made.output

    def run(self, fault: Fault) -> Outcome:
        """Run a training with a fault, and judge how it ended.

        It has ended when no process holds its output open: launcher, ranks, encoders, workers.
        """
        folder = self._folder / str(fault.seed)
        folder.mkdir()
        config, work = folder / 'run.py', folder / 'work'
        config.write_text(config_of(fault, self._data, self._cache))
        start, outcome = time.time(), Outcome(fault)
        run = Launch(config, '--work-dir', work, ranks=fault.ranks, cold=fault.cold, environ=dict(
            self._environ, MAPSAGE_TEST_FAULT=json.dumps(asdict(fault)),
            MAPSAGE_TEST_FOLDER=str(folder)))
        struck = folder / 'struck'
        try:
            finished = run.finish(DEADLINE)
        except AssertionError as error:
            outcome.output = str(error)
            outcome.wrong = ['it does not end' + (' though nothing struck' if not struck.exists()
                                                  else '')]
            return outcome
        outcome.status, outcome.output = finished.status, finished.output
        outcome.cause = finished.final_error.strip()
        outcome.whole = time.time() - start
        if struck.exists():
            outcome.seconds = time.time() - float(struck.read_text().split()[0])
        outcome.wrong = (judge_end(fault, finished, struck.exists())
                         + judge_checkpoints(folder, work))
        if fault.resume and not outcome.wrong and (folder / 'checkpoints').exists():
            outcome.wrong = self._resume(fault, config, work)
        return outcome

    def _resume(self, fault: Fault, config: Path, work: Path) -> List[str]:
        try:
            again = launch(config, '--work-dir', work, '--resume', ranks=fault.ranks,
                           environ=self._environ, timeout=DEADLINE)
        except AssertionError as error:
            return [f'the resumed run does not end: {error}']
        if again.status or 'resuming from' not in again.output:
            return [f'it cannot be resumed:\n{again.output[-3000:]}']
        return []


def judge_end(fault: Fault, finished: Finished, struck: bool) -> List[str]:
    """Return what is wrong with the end of a run."""
    wrong = [f'left running: {each}' for each in finished.left_running]
    error = finished.final_error
    if not struck:
        if fault.place != 'moment' or finished.status:
            wrong.append('it did not come to the fault')
    elif finished.status == 0:
        if fault.kind == 'nan' or not may_go_on(fault):
            wrong.append('it ended with status 0')
        elif f'encoder rank {fault.rank}' not in finished.output:
            wrong.append(f'nothing names encoder rank {fault.rank}')
        elif fault.kind == 'exception' and 'this fault was planted' not in finished.output:
            wrong.append('nothing says why the encoder failed')
    elif not error:
        wrong.append(f'status {finished.status} without an error')
    else:
        wrong += [f'its last words {each}' for each in unnamed(fault, error)]
    return wrong


def may_go_on(fault: Fault) -> bool:
    """Return whether the run may succeed without the encoder that fails."""
    return (fault.place == 'encoder' and fault.kind != 'kill'
            and (fault.fallback or fault.encoders > 1))


def unnamed(fault: Fault, error: str) -> List[str]:
    """Return what the last error of a run fails to say."""
    wrong = []
    died = {'exit': 'status 3|went away|did not come|fell silent', '': '',
            'SIGKILL': 'SIGKILL|signal: Killed', 'SIGSEGV': 'SIGSEGV|Segmentation fault'}
    words = {'kill': died[fault.how], 'exception': 'this fault was planted',
             'nan': r'\bnan\b|not finite|non-finite', 'stall': '', 'stop': ''}[fault.kind]
    if not re.search(words, error, re.IGNORECASE):
        wrong.append(f'do not say {words!r}')
    spread = fault.kind == 'nan' and fault.place in ('gradient', 'encoder')  # DDP gives it to all
    if not spread and not re.search(rf'\brank(\(s\))? \[?{fault.rank}\b', error):
        wrong.append(f'do not name rank {fault.rank}')
    others = [each for each in re.findall(r'rank\(s\) \[([\d, ]+)\]', error)
              if each != str(fault.rank)]
    if others and fault.kind != 'nan':  # which has spread
        wrong.append(f'name rank(s) {others}, and it was rank {fault.rank}')
    return wrong


def judge_checkpoints(folder: Path, work: Path) -> List[str]:
    """Return what is wrong with the checkpoints that a run has left."""
    from planted_faults import digest
    notes = folder / 'checkpoints'
    good = [line.split(' ', 1) for line in notes.read_text().splitlines()] if notes.exists() else []
    found = sorted(work.glob('*.pth'))
    if not found:
        return ['the last good checkpoint is gone'] if good else []
    try:
        with _one_loads:
            choice = choose_checkpoint(str(work))
    except ResumeError as error:
        return [f'no checkpoint can be read: {error}']
    wrong = [f'a checkpoint cannot be read: {each}' for each in choice.skipped]
    state = torch.load(choice.path, map_location='cpu', weights_only=False)['state_dict']
    bad = [name for name, value in state.items() if not torch.isfinite(value).all()]
    if bad:
        wrong.append(f'{Path(choice.path).name} holds NaN, as in {bad[0]}')
    if good and choice.path == good[-1][1] and digest(state) != good[-1][0]:
        wrong.append(f'{Path(choice.path).name} does not hold the weights of the run')
    return wrong


def run_faults(seeds: Sequence[int], folder: Path, jobs: int,
               tell: Callable[[Outcome], None]) -> List[Outcome]:
    """Run the faults of ``seeds``, ``jobs`` at a time; ``tell`` gets each when it has ended."""
    runs, faults = FaultRuns(folder), [draw(seed) for seed in seeds]
    if any(fault.source == 'Cached' for fault in faults):
        runs.make_cache()
    outcomes = []
    with ThreadPoolExecutor(jobs) as pool:
        for ended in as_completed([pool.submit(runs.run, fault) for fault in faults]):
            tell(ended.result())
            outcomes.append(ended.result())
    return outcomes


def table(outcomes: Iterable[Outcome]) -> str:
    """Return counts by kind and result, the slowest ends, and the seeds that went wrong."""
    outcomes = list(outcomes)
    results = ['ended by name', 'went on', 'WRONG']
    counts = Counter((each.fault.kind, each.result) for each in outcomes)
    lines = ['| kind | ' + ' | '.join(results) + ' |', '|---' * 4 + '|']
    for kind in [*KINDS, 'stop']:
        lines.append(f'| {kind} | ' + ' | '.join(str(counts[kind, r]) for r in results) + ' |')
    slow = sorted((o for o in outcomes if o.seconds), key=lambda o: -(o.seconds or 0))[:5]
    lines += ['', 'slowest from the fault to the end:',
              *(f'    {o.seconds:.1f} s: {o.fault}' for o in slow)]
    lines += ['', 'wrong:', *(str(o) for o in outcomes if o.wrong)]
    return '\n'.join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--count', type=int, default=20, help='number of seeds, from --first on')
    parser.add_argument('--first', type=int, default=0)
    parser.add_argument('--seed', type=int, nargs='*', help='these seeds alone')
    parser.add_argument('--jobs', type=int, default=2, help='runs at a time')
    parser.add_argument('--out', type=Path, default=Path(tempfile.gettempdir(), 'mapsage-faults'))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    def tell(outcome: Outcome) -> None:
        print(outcome, flush=True)
        if outcome.wrong or args.seed:
            (args.out / f'{outcome.fault.seed}.log').write_text(f'{outcome}\n\n{outcome.output}')

    with tempfile.TemporaryDirectory(prefix='mapsage-faults-') as folder:
        outcomes = run_faults(args.seed or range(args.first, args.first + args.count),
                              Path(folder), args.jobs, tell)
    (args.out / 'table.md').write_text(table(outcomes) + '\n')
    print(table(outcomes))
    return int(any(each.wrong for each in outcomes))


if __name__ == '__main__':
    sys.exit(main())
