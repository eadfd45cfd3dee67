"""Launched trainings that break once, at random: how they run, and what must hold then.

    OMP_NUM_THREADS=1 python tests/fault_runs.py --count 200 --jobs 3 --out faults
    OMP_NUM_THREADS=1 python tests/fault_runs.py --seed 17

A fault follows from its seed, see ``fault_kinds.py``. ``--out`` is a folder for the table and for
the output of each run that did not end as it must.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / 'distributed'), str(HERE.parent)]

import torch  # noqa: E402
from fault_kinds import (  # noqa: E402
    CARD_FAULTS,
    GOES_ON,
    KINDS,
    LEAVES,
    NAMED,
    PLANTED,
    Fault,
    config_of,
    draw,
    may_go_on,
)
from support import Finished, Launch, launch, write_tiny_data  # noqa: E402
from warm_python import warm_python  # noqa: E402

import mapsage  # noqa: E402, F401  (closes the hosts' gaps)
from mapsage.engine.checkpoints.resume import ResumeError, choose_checkpoint  # noqa: E402
from mapsage_launcher.stop_request import STATUS as LEFT_STATUS  # noqa: E402

_one_loads = threading.Lock()  # torch keeps the types that a file may hold for the whole process

# Seconds from the start of a run to its end: it waits for TIMEOUT at the start or in the step, and
# torchrun gives a stopped process 30 s to end. The rest is for a machine that does other work too.
DEADLINE = 150.0


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        struck: What the injector wrote at the moment it struck: a record for each time.
        culprits: Ranks that the launcher's last error names as the cause.
        cause: What the launcher printed at last; empty if the run succeeded.
        seconds: From the fault to the end; None if nothing struck.
        wrong: What does not hold, by column of the table; empty for a good end.
        checkpoint: Whether there is a checkpoint that could be judged.
        resumed: Whether the run was resumed.
    """

    fault: Fault
    status: Optional[int] = None
    struck: List[Dict[str, Any]] = field(default_factory=list)
    culprits: Set[int] = field(default_factory=set)
    cause: str = ''
    seconds: Optional[float] = None
    whole: float = 0.0
    wrong: List[Tuple[str, str]] = field(default_factory=list)
    checkpoint: bool = False
    resumed: bool = False
    output: str = ''

    def __str__(self) -> str:
        when = 'no fault' if self.seconds is None else f'{self.seconds:.1f} s after it'
        cause = ' | '.join(line.strip() for line in self.cause.splitlines() if line.strip())
        end = 'WRONG' if self.wrong else 'as it must'
        struck = ', '.join(sorted({f"rank {record['rank']}" for record in self.struck})) or 'none'
        return '\n'.join([
            f'{self.fault}\n    {end}, status {self.status}, {self.whole:.1f} s, {when}; struck '
            f'{struck}, named {sorted(self.culprits) or "none"}; '
            f'{"resumed" if self.resumed else "not resumed"}: {cause[:300] or "no error"}',
            *(f'    WRONG ({column}): {what}' for column, what in self.wrong)])


class FaultRuns:
    """Runs faults in folders of their own.

    Args:
        folder: An empty folder.
        resumes: Whether what ended is resumed, and its weights compared with those of a run that
            nothing disturbs.
    """

    def __init__(self, folder: Path, resumes: bool = True) -> None:
        self._folder, self._resumes = folder, resumes
        self._data = write_tiny_data(folder / 'data')
        self._cache = folder / 'cache'
        self._environ = {'PYTHONPATH': str(HERE / 'distributed')}
        self._references: Dict[Tuple[Any, ...], str] = {}
        self._locks: Dict[Tuple[Any, ...], threading.Lock] = {}
        self._lock = threading.Lock()
        warm_python()  # in the main thread, with which the server ends

    def make_cache(self) -> None:
        """Compute the features for sources of type 'Cached'."""
        path = self._folder / 'cached.py'
        path.write_text(config_of(Fault(0, '', '', '', source='Cached'), self._data, self._cache))
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
        run = Launch(config, '--work-dir', work, ranks=fault.ranks, environ=dict(
            self._environ, MAPSAGE_TEST_FAULT=json.dumps(asdict(fault)),
            MAPSAGE_TEST_FOLDER=str(folder)))
        if fault.action.endswith('to the launcher'):
            threading.Thread(target=_signal_launcher, args=(run, fault, folder),
                             daemon=True).start()
        try:
            finished = run.finish(DEADLINE)
        except AssertionError as error:
            outcome.output = str(error)
            outcome.struck = records(folder)
            outcome.wrong = [('in time', 'it does not end' + (
                '' if outcome.struck else ' though nothing struck'))]
            return outcome
        outcome.status, outcome.output = finished.status, finished.output
        outcome.cause = finished.final_error.strip()
        outcome.whole = time.time() - start
        outcome.struck, outcome.culprits = records(folder), named_culprits(finished.final_error)
        if outcome.struck:
            outcome.seconds = time.time() - outcome.struck[0]['time']
        outcome.wrong = [*judge_end(fault, finished, outcome)]
        for path in work.glob('*.pth'):
            if path.is_dir():  # which the injector put in the way of a checkpoint
                path.rmdir()
        outcome.checkpoint = any(work.glob('*.pth'))
        outcome.wrong += [('checkpoint', what) for what in judge_checkpoints(folder, work)]
        if outcome.wrong or not self._resumes:
            return outcome
        if outcome.status == 0:
            self._compare(outcome, folder)
        elif outcome.checkpoint:
            self._resume(outcome, config, folder)
        return outcome

    def _resume(self, outcome: Outcome, config: Path, folder: Path) -> None:
        outcome.resumed = True
        try:
            again = launch(config, '--work-dir', folder / 'work', '--resume',
                           ranks=outcome.fault.ranks, timeout=DEADLINE,
                           environ=dict(self._environ, MAPSAGE_TEST_FOLDER=str(folder)))
        except AssertionError as error:
            outcome.wrong.append(('resumed', f'the resumed run does not end: {error}'))
            return
        if again.status or 'resuming from' not in again.output:
            outcome.wrong.append(('resumed', f'it cannot be resumed:\n{again.output[-3000:]}'))
        else:
            self._compare(outcome, folder)

    def _compare(self, outcome: Outcome, folder: Path) -> None:
        """Compare the weights at the end with those of a run that nothing disturbs."""
        final = folder / 'final'
        if not final.exists() or final.read_text() != self._reference(outcome.fault):
            outcome.wrong.append(('resumed' if outcome.resumed else 'bits',
                                  'the weights at the end are not those of an undisturbed run'))

    def _reference(self, fault: Fault) -> str:
        """Return the digest of the weights of the undisturbed run."""
        with self._lock:
            lock = self._locks.setdefault(fault.reference, threading.Lock())
        with lock:
            if fault.reference not in self._references:
                plain = replace(fault, ranks=fault.heads, encoders=0, workers=0, persistent=False,
                                source='Local' if fault.source else None, by_epoch=False,
                                sampling='none' if fault.sampling == 'none' else 'plain')
                folder = self._folder / f'undisturbed {len(self._references)} {fault.seed}'
                folder.mkdir()
                config = folder / 'run.py'
                config.write_text(config_of(plain, self._data, self._cache))
                run = launch(config, '--work-dir', folder / 'work', ranks=plain.ranks,
                             environ=dict(self._environ, MAPSAGE_TEST_FOLDER=str(folder)))
                assert run.status == 0, run.output
                self._references[fault.reference] = (folder / 'final').read_text()
            return self._references[fault.reference]


def _signal_launcher(run: Launch, fault: Fault, folder: Path) -> None:
    while not (folder / 'struck').exists() and run.process.poll() is None:
        time.sleep(0.01)
    if run.process.poll() is None:
        os.kill(run.process.pid, getattr(signal, fault.action.split()[0]))


def records(folder: Path) -> List[Dict[str, Any]]:
    """Return what the injector wrote when it struck."""
    path = folder / 'struck'
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def named_culprits(error: str) -> Set[int]:
    """Return the ranks that the launcher's last error names as the cause."""
    heading = error.strip().split('\n')[0]
    match = re.match(r'error: rank (\d+) failed first', heading) or re.match(
        r'error: rank\(s\) \[([\d, ]+)\] (?:was waited|were waited|aborted)', heading)
    if match:
        return {int(rank) for rank in match.group(1).split(',')}
    if 'RankLostError: ' in error:  # which says that it does not know
        return set()
    # All ranks report the same error, which names the rank.
    names = re.findall(r'(?m)^ *rank (\d+)\b', error) or re.findall(r'\brank (\d+)\b', error)
    for others in re.findall(r'the same on rank\(s\) \[([\d, ]+)\]', error):
        names += others.split(',')
    return {int(rank) for rank in names}


def judge_end(fault: Fault, finished: Finished, outcome: Outcome) -> List[Tuple[str, str]]:
    """Return what is wrong with the end of a run, by column of the table."""
    kind, error = KINDS[fault.kind], finished.final_error
    wrong = [('in time', f'left running: {process}') for process in finished.left_running]
    if not outcome.struck:
        # the run may end before a moment in its last step
        if fault.place != 'moment' or finished.status:
            wrong.append(('struck', 'it did not come to the fault'))
    elif kind.end == LEAVES:
        if finished.status != LEFT_STATUS:
            wrong.append(('named', f'status {finished.status}, and it was asked to leave'))
    elif kind.end == GOES_ON:
        if finished.status:
            wrong.append(('named', f'status {finished.status}, and it may go on'))
    elif finished.status == 0:
        wrong += _judge_success(fault, finished)
    elif not error:
        wrong.append(('named', f'status {finished.status} without an error'))
    else:
        wrong += [('named', what) for what in unnamed(fault, error, outcome)]
    return wrong


def _judge_success(fault: Fault, finished: Finished) -> List[Tuple[str, str]]:
    if not may_go_on(fault):
        return [('named', 'it ended with status 0')]
    if f'encoder rank {fault.rank}' not in finished.output:
        return [('named', f'nothing names encoder rank {fault.rank}')]
    if fault.action == 'exception' and PLANTED not in finished.output:
        return [('named', 'nothing says why the encoder failed')]
    return []


def unnamed(fault: Fault, error: str, outcome: Outcome) -> List[str]:
    """Return what the last error of a run fails to say, or whom it names wrongly."""
    kind, wrong = KINDS[fault.kind], []
    says = PLANTED if fault.action == 'exception' else kind.says
    if not re.search(says, error, re.IGNORECASE):
        wrong.append(f'the last words do not say {says!r}')
    struck = {record['rank'] for record in outcome.struck}
    innocents = outcome.culprits - struck
    if kind.spreads:  # all of them, or whom it struck
        innocents = innocents if len(outcome.culprits) < fault.heads else set()
    if kind.pair and fault.heads == 2 and len(outcome.culprits) == 1:
        innocents = set()
    if innocents or not (outcome.culprits or kind.spreads):
        wrong.append(f'the last words name {sorted(outcome.culprits) or "no rank"}, and rank '
                     f'{sorted(struck)} was struck')
    return wrong


def judge_checkpoints(folder: Path, work: Path) -> List[str]:
    """Return what is wrong with the checkpoints that a run has left."""
    from planted_faults import digest
    notes = folder / 'checkpoints'
    good = [line.split(' ', 1) for line in notes.read_text().splitlines()] if notes.exists() else []
    if not any(path.is_file() for path in work.glob('*.pth')):
        return ['the last good checkpoint is gone'] if good else []
    try:
        with _one_loads:
            choice = choose_checkpoint(str(work))
    except ResumeError as error:
        return [f'no checkpoint can be read: {error}']
    wrong = [f'a checkpoint cannot be read: {line}' for line in choice.skipped]
    state = torch.load(choice.path, map_location='cpu', weights_only=False)['state_dict']
    bad = [name for name, value in state.items() if not torch.isfinite(value).all()]
    if bad:
        wrong.append(f'{Path(choice.path).name} holds NaN, as in {bad[0]}')
    if good and choice.path == good[-1][1] and digest(state) != good[-1][0]:
        wrong.append(f'{Path(choice.path).name} does not hold the weights of the run')
    return wrong


def run_faults(faults: Sequence[Fault], folder: Path, jobs: int,
               tell: Callable[[Outcome], None], resumes: bool = True) -> List[Outcome]:
    """Run faults, ``jobs`` at a time; ``tell`` gets each outcome when the run has ended."""
    runs = FaultRuns(folder, resumes)
    if any(fault.source == 'Cached' for fault in faults):
        runs.make_cache()
    outcomes = []
    with ThreadPoolExecutor(jobs) as pool:
        for ended in as_completed([pool.submit(runs.run, fault) for fault in faults]):
            tell(ended.result())
            outcomes.append(ended.result())
    return outcomes


def table(outcomes: Iterable[Outcome]) -> str:
    """Return counts by kind, the slowest ends, and the seeds that went wrong."""
    outcomes = list(outcomes)
    lines = ['| kind | runs | struck | ended or continued in time | culprit right | checkpoint '
             'good | resumed equal | seeds |', '|---' * 8 + '|']
    for kind in KINDS:
        runs = [outcome for outcome in outcomes if outcome.fault.kind == kind]
        if runs:
            lines.append(_row(kind, runs))
    lines.append(_row('all', outcomes))
    slow = sorted((o for o in outcomes if o.seconds), key=lambda o: -(o.seconds or 0))[:5]
    lines += ['', 'slowest from the fault to the end:',
              *(f'    {outcome.seconds:.1f} s: {outcome.fault}' for outcome in slow)]
    lines += ['', 'wrong:', *(str(outcome) for outcome in outcomes if outcome.wrong)]
    return '\n'.join(lines)


def _row(name: str, runs: Sequence[Outcome]) -> str:
    """Return a row of the table; of each property, how many have it of those that could."""
    def share(column: Sequence[str], able: Sequence[Outcome]) -> str:
        good = [outcome for outcome in able
                if not any(what in column for what, _ in outcome.wrong)]
        return f'{len(good)}/{len(able)}' if able else '-'

    struck = [outcome for outcome in runs if outcome.struck]
    ended = [outcome for outcome in struck if outcome.status is not None]
    seeds = ' '.join(str(outcome.fault.seed) for outcome in runs)
    named = [outcome for outcome in ended if KINDS[outcome.fault.kind].end == NAMED]
    cells = [name, str(len(runs)), str(len(struck)), share(['in time'], struck),
             share(['named'], named),
             share(['checkpoint'], [outcome for outcome in ended if outcome.checkpoint]),
             share(['resumed', 'bits'], [outcome for outcome in ended
                                         if outcome.resumed or outcome.status == 0]),
             seeds if name != 'all' else '']
    return '| ' + ' | '.join(cells) + ' |'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--count', type=int, default=20, help='number of seeds, from --first on')
    parser.add_argument('--first', type=int, default=0)
    parser.add_argument('--seed', type=int, nargs='*', help='these seeds alone')
    parser.add_argument('--cards', action='store_true',
                        help='the faults over simulated cards, instead of seeds')
    parser.add_argument('--jobs', type=int, default=2, help='runs at a time')
    parser.add_argument('--out', type=Path, default=Path(tempfile.gettempdir(), 'mapsage-faults'))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    def tell(outcome: Outcome) -> None:
        print(outcome, flush=True)
        if outcome.wrong or args.seed or args.cards:
            (args.out / f'{outcome.fault.seed}.log').write_text(f'{outcome}\n\n{outcome.output}')

    seeds = args.seed or range(args.first, args.first + args.count)
    with tempfile.TemporaryDirectory(prefix='mapsage-faults-') as folder:
        faults = CARD_FAULTS if args.cards else [draw(seed) for seed in seeds]
        outcomes = run_faults(faults, Path(folder), args.jobs, tell)
    (args.out / 'table.md').write_text(table(outcomes) + '\n')
    print(table(outcomes))
    return int(any(outcome.wrong for outcome in outcomes))


if __name__ == '__main__':
    sys.exit(main())
