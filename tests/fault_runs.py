"""Launched trainings that break once, at random: how they run, and what must hold then.

    OMP_NUM_THREADS=1 python tests/fault_runs.py --count 200 --jobs 3 --out faults
    OMP_NUM_THREADS=1 python tests/fault_runs.py --seed 17
    OMP_NUM_THREADS=1 python tests/fault_runs.py --files --count 100

A fault follows from its seed, see ``fault_kinds.py``. ``--out`` is a folder for the table and for
the output of each run that did not end as it must.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / 'distributed'), str(HERE.parent)]

import torch  # noqa: E402
from fault_kinds import (  # noqa: E402
    AT_REST,
    CARD_FAULTS,
    FILE_KINDS,
    GOES_ON,
    HARMLESS,
    KINDS,
    LEAVES,
    MAPPING,
    PLANTED,
    REFUSED,
    SCENES,
    WAITS,
    Fault,
    config_of,
    draw,
    may_go_on,
)
from file_faults import (  # noqa: E402
    ESCAPES,
    stop,
    strike,
    write_predict_model,
    write_scenes,
)
from support import ROOT, SCRIPT, Finished, Launch, launch, write_tiny_data  # noqa: E402
from warm_python import warm_python  # noqa: E402

import mapsage  # noqa: E402, F401  (closes the hosts' gaps)
from mapsage.engine.checkpoints.resume import ResumeError, choose_checkpoint  # noqa: E402
from mapsage_launcher.stop_request import STATUS as LEFT_STATUS  # noqa: E402

_one_loads = threading.Lock()  # torch keeps the types that a file may hold for the whole process

# Seconds from the start of an undisturbed run to its end, on a machine that does other work too.
# The deadlines of the kinds are as long: a run waits for TIMEOUT at the start or in the step, and
# torchrun gives a stopped process 30 s to end.
DEADLINE = 150.0
PARTIAL = 3  # exit status of a prediction that left scenes out


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
        struck = ', '.join(sorted({f'rank {record["rank"]}' for record in self.struck})) or 'none'
        return '\n'.join(
            [
                f'{self.fault}\n    {end}, status {self.status}, {self.whole:.1f} s, {when}; struck '
                f'{struck}, named {sorted(self.culprits) or "none"}; '
                f'{"resumed" if self.resumed else "not resumed"}: {cause[:300] or "no error"}',
                *(f'    WRONG ({column}): {what}' for column, what in self.wrong),
            ]
        )


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
        self._references: Dict[Tuple[Any, ...], Path] = {}
        self._locks: Dict[Tuple[Any, ...], threading.Lock] = {}
        self._lock = threading.Lock()
        warm_python()  # in the main thread, with which the server ends

    def make_cache(self) -> None:
        """Compute the features for sources of type 'Cached'."""
        path = self._folder / 'cached.py'
        path.write_text(config_of(Fault(0, '', '', '', source='Cached'), self._data, self._cache))
        made = launch(
            path,
            '--folder',
            self._cache,
            '--accelerator',
            'cpu',
            command=[sys.executable, 'tools/cache_features.py'],
            environ=self._environ,
        )
        assert made.status == 0, made.output

    def run(self, fault: Fault) -> Outcome:
        """Run a training or a prediction with a fault, and judge how it ended.

        It has ended when no process holds its output open: launcher, ranks, encoders, workers.
        """
        folder = self._folder / str(fault.seed)
        folder.mkdir()
        outcome = Outcome(fault)
        if KINDS[fault.kind].when == AT_REST:
            self._run_at_rest(outcome, folder)
        elif KINDS[fault.kind].when == MAPPING:
            self._run_mapping(outcome, folder)
        else:
            self._run_training(outcome, folder)
        return outcome

    def _finish(self, outcome: Outcome, run: Launch, folder: Path) -> Optional[Finished]:
        """Wait for the end of a run and note it; return None if there is none."""
        start = time.time()
        try:
            finished = run.finish(KINDS[outcome.fault.kind].deadline)
        except AssertionError as error:
            outcome.output = str(error)
            outcome.struck = records(folder)
            if KINDS[outcome.fault.kind].end == WAITS:
                outcome.wrong = judge_wait(outcome)
                return None
            outcome.wrong = [
                (
                    'in time',
                    'it does not end' + ('' if outcome.struck else ' though nothing struck'),
                )
            ]
            return None
        outcome.status, outcome.output = finished.status, finished.output
        outcome.cause = finished.final_error.strip()
        outcome.whole = time.time() - start
        outcome.struck, outcome.culprits = records(folder), named_culprits(finished.final_error)
        if outcome.struck:
            outcome.seconds = time.time() - outcome.struck[0]['time']
        outcome.wrong = [
            ('in time', f'left running: {process}') for process in finished.left_running
        ]
        return finished

    def _run_training(self, outcome: Outcome, folder: Path) -> None:
        fault = outcome.fault
        config, work = folder / 'run.py', folder / 'work'
        config.write_text(config_of(fault, self._data, self._cache))
        arguments, options = _unusual_start(fault, folder)
        run = Launch(
            *([] if 'command' in options else [config]),
            '--work-dir',
            work,
            *arguments,
            **{'ranks': fault.ranks, **options},
            environ=dict(
                self._environ,
                MAPSAGE_TEST_FAULT=json.dumps(asdict(fault)),
                MAPSAGE_TEST_FOLDER=str(folder),
            ),
        )
        if fault.action.endswith('to the launcher'):
            threading.Thread(
                target=_signal_launcher, args=(run, fault, folder), daemon=True
            ).start()
        finished = self._finish(outcome, run, folder)
        if finished is None:
            return
        outcome.wrong += judge_end(fault, finished, outcome)
        for path in work.glob('*.pth'):
            if path.is_dir():  # which the injector put in the way of a checkpoint
                path.rmdir()
        outcome.checkpoint = any(work.glob('*.pth'))
        outcome.wrong += [('checkpoint', what) for what in judge_checkpoints(folder, work)]
        if outcome.wrong or not self._resumes:
            return
        if outcome.status == 0:
            self._compare(outcome, folder)
        elif outcome.checkpoint:
            self._resume(outcome, config, folder)

    def _run_at_rest(self, outcome: Outcome, folder: Path) -> None:
        """Resume a run whose files were changed."""
        fault = outcome.fault
        stopped = stop(self._reference(fault) / 'work', folder)
        config = folder / 'run.py'
        config.write_text(config_of(fault, self._data_of(fault), self._cache))
        strike(fault, stopped)
        note(fault, folder, stopped.struck_file)
        run = Launch(
            config,
            '--work-dir',
            stopped.work,
            '--resume',
            ranks=fault.ranks,
            environ=dict(
                MAPSAGE_TEST_FOLDER=str(folder),
                PYTHONPATH=os.pathsep.join([self._environ['PYTHONPATH'], str(folder)]),
            ),
        )
        finished = self._finish(outcome, run, folder)
        outcome.wrong += [('named', what) for what in stopped.wrong()]
        if finished is None:
            return
        outcome.resumed = finished.status == 0
        outcome.wrong += judge_resumed(fault, finished, outcome)
        if outcome.resumed and not outcome.wrong and fault.place != 'data':
            self._compare(outcome, folder)

    def _run_mapping(self, outcome: Outcome, folder: Path) -> None:
        """Map scenes, one of which is struck, and map it again when it is whole."""
        fault = outcome.fault
        expected = self._maps()
        shutil.copytree(str(self._folder / 'scenes'), str(folder / 'scenes'))
        planted = dict(
            MAPSAGE_TEST_FAULT=json.dumps(asdict(fault)), MAPSAGE_TEST_FOLDER=str(folder)
        )
        finished = self._finish(outcome, self._predict(folder, fault.ranks, planted), folder)
        if finished is None:
            return
        maps = read_maps(folder)
        victim = outcome.struck[0]['file'] if outcome.struck else ''
        if not victim:
            outcome.wrong.append(('struck', 'it did not come to the fault'))
        if finished.status != (0 if victim in maps else PARTIAL):
            outcome.wrong.append(
                (
                    'named',
                    f'status {finished.status}, and {len(maps)} of {SCENES} scenes are mapped',
                )
            )
        elif finished.status and f'scenes/{victim}' not in finished.output:
            outcome.wrong.append(('named', f'nothing says that {victim} was left out'))
        if set(expected) - set(maps) - {victim}:
            outcome.wrong.append(('checkpoint', f'{len(maps)} of {SCENES} scenes are mapped'))
        outcome.wrong += [
            ('checkpoint', f'the map of {name} is not that of an undisturbed run')
            for name, content in maps.items()
            if content != expected.get(name)
        ]
        if outcome.wrong or not self._resumes:
            return
        path = folder / 'scenes' / victim
        if path.exists():
            path.unlink()
        shutil.copy(str(self._folder / 'scenes' / victim), str(path))
        again = self._predict(folder, fault.ranks, {}).finish(DEADLINE)
        outcome.resumed = True
        if again.status or read_maps(folder) != expected:
            outcome.wrong.append(
                (
                    'resumed',
                    'with all scenes whole, the maps are not those of an '
                    f'undisturbed run:\n{again.output[-2000:]}',
                )
            )

    def _predict(self, folder: Path, ranks: int, environ: Dict[str, str]) -> Launch:
        return Launch(
            self._folder / 'bands.py',
            self._folder / 'bands.pth',
            folder / 'scenes',
            '--out',
            folder / 'maps',
            '--skip-broken',
            '--batch-size',
            2,
            command=['bash', str(ROOT / 'scripts' / 'predict.sh')],
            ranks=ranks,
            environ=dict(self._environ, ACCELERATOR='cpu', **environ),
        )

    def _maps(self) -> Dict[str, bytes]:
        """Return the maps of an undisturbed prediction, by the names of their scenes."""
        with self._lock:
            if not (self._folder / 'scenes').exists():
                write_scenes(self._folder / 'scenes')
                write_predict_model(self._folder)
                finished = self._predict(self._folder, 1, {}).finish(DEADLINE)
                assert finished.status == 0, finished.output
            return read_maps(self._folder)

    def _data_of(self, fault: Fault) -> Path:
        """Return the training data; a fault that changes them has its own."""
        if fault.place != 'data':
            return self._data
        data = self._folder / str(fault.seed) / 'data'
        if not data.exists():
            shutil.copytree(str(self._data), str(data))
        return data

    def _resume(self, outcome: Outcome, config: Path, folder: Path) -> None:
        outcome.resumed = True
        try:
            again = launch(
                config,
                '--work-dir',
                folder / 'work',
                '--resume',
                ranks=outcome.fault.ranks,
                timeout=DEADLINE,
                environ=dict(self._environ, MAPSAGE_TEST_FOLDER=str(folder)),
            )
        except AssertionError as error:
            outcome.wrong.append(('resumed', f'the resumed run does not end: {error}'))
            return
        if again.status or 'resuming from' not in again.output:
            outcome.wrong.append(('resumed', f'it cannot be resumed:\n{again.output[-3000:]}'))
        else:
            self._compare(outcome, folder)

    def _compare(self, outcome: Outcome, folder: Path) -> None:
        """Compare the weights at the end with those of a run that nothing disturbs."""
        reference, column = self._reference(outcome.fault), 'resumed' if outcome.resumed else 'bits'
        final = folder / 'final'
        if not final.exists() or final.read_text() != (reference / 'final').read_text():
            outcome.wrong.append(
                (column, 'the weights at the end are not those of an undisturbed run')
            )
        if outcome.fault.scores is not None and not outcome.fault.at_rest:
            best, expected = best_checkpoints(folder), best_checkpoints(reference)
            # A rank that is killed before it removes the best checkpoint of before leaves that too.
            if not expected.items() <= best.items():
                outcome.wrong.append(
                    (
                        column,
                        f'best checkpoints {sorted(best)}, of an undisturbed '
                        f'run {sorted(expected)}, or their weights differ',
                    )
                )

    def _reference(self, fault: Fault) -> Path:
        """Return the folder of the undisturbed run."""
        with self._lock:
            lock = self._locks.setdefault(fault.reference, threading.Lock())
        with lock:
            if fault.reference not in self._references:
                plain = replace(
                    fault,
                    ranks=fault.heads,
                    encoders=0,
                    workers=0,
                    persistent=False,
                    source='Local' if fault.source else None,
                    by_epoch=fault.by_epoch and fault.scores is not None,
                    sampling='none' if fault.sampling == 'none' else 'plain',
                )
                folder = self._folder / f'undisturbed {fault.seed}'
                folder.mkdir()
                config = folder / 'run.py'
                config.write_text(config_of(plain, self._data_of(fault), self._cache))
                run = launch(
                    config,
                    '--work-dir',
                    folder / 'work',
                    ranks=plain.ranks,
                    environ=dict(self._environ, MAPSAGE_TEST_FOLDER=str(folder)),
                )
                assert run.status == 0, run.output
                self._references[fault.reference] = folder
            return self._references[fault.reference]


def _unusual_start(fault: Fault, folder: Path) -> Tuple[List[str], Dict[str, Any]]:
    """Return arguments and options of a launch in which the start is the fault."""
    if fault.kind == 'no worker to keep':
        note(fault, folder)
        if fault.action == 'override':
            return ['--cfg-options', f'{fault.place}.persistent_workers=True'], {}
        with open(folder / 'run.py', 'a') as config:
            config.write(f"{fault.place}['persistent_workers'] = True\n")
    elif fault.action == 'small /dev/shm':
        note(fault, folder)
        # From nothing: a process that was forked from another is in the mounts of that one.
        return [], dict(
            cold=True,
            command=[
                'unshare',
                *([] if os.geteuid() == 0 else ['-r']),
                '-m',
                '--',
                'bash',
                '-c',
                'mount -t tmpfs -o size=256k small /dev/shm && exec bash "$@"',
                'bash',
                str(SCRIPT),
                str(folder / 'run.py'),
            ],
        )
    elif fault.kind == 'MASTER_ADDR elsewhere':
        note(fault, folder, fault.place)
        variables = f'MASTER_ADDR={fault.place} MASTER_PORT={20_000 + fault.seed % 10_000}'
        if fault.action == 'launcher':
            command = f'NNODES=2 NODE_RANK=0 {variables} exec bash {SCRIPT} "$@"'
        else:
            # as a queue of jobs starts its processes
            command = (
                f'export {variables} WORLD_SIZE={fault.ranks}\n'
                f'for rank in $(seq 1 {fault.ranks - 1}) 0; do RANK=$rank LOCAL_RANK=$rank '
                '"$MAPSAGE_PYTHON" tools/train.py "$@" --launcher pytorch & last=$!; done\n'
                'wait $last; status=$?; wait; exit $status'
            )
        return [], dict(command=['bash', '-c', command, 'bash', str(folder / 'run.py')])
    return [], {}


def _signal_launcher(run: Launch, fault: Fault, folder: Path) -> None:
    while not (folder / 'struck').exists() and run.process.poll() is None:
        time.sleep(0.01)
    if run.process.poll() is None:
        os.kill(run.process.pid, getattr(signal, fault.action.split()[0]))


def records(folder: Path) -> List[Dict[str, Any]]:
    """Return what the injector wrote when it struck."""
    path = folder / 'struck'
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def note(fault: Fault, folder: Path, file: str = '') -> None:
    """Write a record as the injector does, for what no process of the run does."""
    from planted_faults import record

    record(asdict(fault), folder, fault.rank, file)


def read_maps(folder: Path) -> Dict[str, bytes]:
    """Return the contents of the maps in a folder by name."""
    return {path.name: path.read_bytes() for path in (folder / 'maps').glob('[!.]*.tif')}


def best_checkpoints(folder: Path) -> Dict[str, str]:
    """Return digests of the weights of the best checkpoints of a run by name."""
    from planted_faults import digest

    return {
        path.name: digest(
            torch.load(str(path), map_location='cpu', weights_only=False)['state_dict']
        )
        for path in (folder / 'work').glob('best_*.pth')
    }


def named_culprits(error: str) -> Set[int]:
    """Return the ranks that the launcher's last error names as the cause."""
    heading = error.strip().split('\n')[0]
    match = re.match(r'error: rank (\d+) failed first', heading) or re.match(
        r'error: rank\(s\) \[([\d, ]+)\] (?:was waited|were waited|aborted)', heading
    )
    if match:
        return {int(rank) for rank in match.group(1).split(',')}
    if 'RankLostError: ' in error:  # which says that it does not know
        return set()
    # All ranks report the same error, which names the rank.
    names = re.findall(r'(?m)^ *rank (\d+)\b', error) or re.findall(r'\brank (\d+)\b', error)
    for others in re.findall(r'the same on rank\(s\) \[([\d, ]+)\]', error):
        names += others.split(',')
    # An error that says no rank is of those that report it.
    match = re.match(r'error: rank\(s\) \[([\d, ]+)\] report:', heading)
    if not names and match:
        names = match.group(1).split(',')
    return {int(rank) for rank in names}


def judge_end(fault: Fault, finished: Finished, outcome: Outcome) -> List[Tuple[str, str]]:
    """Return what is wrong with the end of a run, by column of the table."""
    kind, error = KINDS[fault.kind], finished.final_error
    wrong: List[Tuple[str, str]] = []
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
    elif kind.end == HARMLESS:
        wrong += _judge_refusal(fault, finished, outcome) if finished.status else []
    elif kind.end == WAITS:
        wrong += judge_wait(outcome)
        wrong += [] if finished.status else [('named', 'it ended with status 0')]
    elif finished.status == 0:
        wrong += _judge_success(fault, finished, outcome)
    elif not error:
        wrong.append(('named', f'status {finished.status} without an error'))
    else:
        wrong += [('named', what) for what in unnamed(fault, error, outcome)]
    return wrong


def judge_resumed(fault: Fault, finished: Finished, outcome: Outcome) -> List[Tuple[str, str]]:
    """Return what is wrong with the end of a run that was resumed from changed files."""
    end, struck_file = KINDS[fault.kind].end, outcome.struck[0]['file']
    if ESCAPES in finished.output:
        return [('named', 'escape sequences of a file reach the terminal')]
    if end == REFUSED or (end == HARMLESS and finished.status):
        return _judge_refusal(fault, finished, outcome)
    if finished.status:
        return [('named', f'status {finished.status}, and it may go on')]
    resumed_from = re.search(r'resuming from (\S+\.pth)', finished.output)
    if fault.kind == 'flipped bit' and not (
        resumed_from
        and (
            Path(resumed_from.group(1)).name == struck_file
            or re.search(rf'WARNING.*{re.escape(struck_file)}', finished.output)
        )
    ):
        return [('named', f'nothing warns that {struck_file} is damaged')]
    if fault.kind == 'image replaced' and not re.search(
        r'WARNING.*\b(data|train_dataloader)', finished.output
    ):
        return [('named', f'nothing warns of other data, and {struck_file} was replaced')]
    return []


def judge_wait(outcome: Outcome) -> List[Tuple[str, str]]:
    """Return what is wrong with the output of a run whose ranks cannot meet."""
    return [
        ('named', f'nothing says {pattern!r}')
        for pattern in patterns_of(outcome.fault, outcome)
        if not re.search(pattern, outcome.output)
    ]


def _judge_refusal(fault: Fault, finished: Finished, outcome: Outcome) -> List[Tuple[str, str]]:
    error = finished.final_error or finished.output
    if finished.status == 0:
        return [('named', 'it ended with status 0')]
    return [
        ('named', f'the last words do not say {pattern!r}')
        for pattern in patterns_of(fault, outcome)
        if not re.search(pattern, error, re.I)
    ]


def patterns_of(fault: Fault, outcome: Outcome) -> List[str]:
    """Return the patterns that the last error must have, next to the rank."""
    if fault.action == 'exception':
        return [PLANTED]
    says = KINDS[fault.kind].says.replace('{file}', re.escape(outcome.struck[0]['file']))
    # A log is named; for a checkpoint, what the disk lacks is said too.
    lacks = {'EDQUOT': ['quota'], 'no inodes': ['inode']}
    return [says, *(lacks.get(fault.action, []) if fault.place == '.pth' else [])]


def _judge_success(fault: Fault, finished: Finished, outcome: Outcome) -> List[Tuple[str, str]]:
    if fault.place == 'scalars.json':
        warnings = re.findall(r'.*\bWARNING\b.*', finished.output)
        return (
            []
            if any(
                all(
                    re.search(pattern, line, re.IGNORECASE)
                    for pattern in patterns_of(fault, outcome)
                )
                for line in warnings
            )
            else [('named', f'no warning says {patterns_of(fault, outcome)}')]
        )
    if fault.kind == 'shared memory refused':
        return []  # batches may come another way
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
    wrong += [
        f'the last words do not say {pattern!r}'
        for pattern in patterns_of(fault, outcome)
        if not re.search(pattern, error, re.IGNORECASE)
    ]
    if fault.action == 'small /dev/shm':
        return wrong  # all ranks have it
    struck = {record['rank'] for record in outcome.struck}
    innocents = outcome.culprits - struck
    if kind.spreads:  # all of them, or whom it struck
        innocents = innocents if len(outcome.culprits) < fault.heads else set()
    if kind.pair and fault.heads == 2 and len(outcome.culprits) == 1:
        innocents = set()
    if innocents or not (outcome.culprits or kind.spreads):
        wrong.append(
            f'the last words name {sorted(outcome.culprits) or "no rank"}, and rank '
            f'{sorted(struck)} was struck'
        )
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


def run_faults(
    faults: Sequence[Fault],
    folder: Path,
    jobs: int,
    tell: Callable[[Outcome], None],
    resumes: bool = True,
) -> List[Outcome]:
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
    lines = [
        '| kind | runs | struck | ended or continued in time | culprit right | checkpoint '
        'good | resumed equal | seeds |',
        '|---' * 8 + '|',
    ]
    for kind in KINDS:
        runs = [outcome for outcome in outcomes if outcome.fault.kind == kind]
        if runs:
            lines.append(_row(kind, runs))
    lines.append(_row('all', outcomes))
    slow = sorted((o for o in outcomes if o.seconds), key=lambda o: -(o.seconds or 0))[:5]
    lines += [
        '',
        'slowest from the fault to the end:',
        *(f'    {outcome.seconds:.1f} s: {outcome.fault}' for outcome in slow),
    ]
    lines += ['', 'wrong:', *(str(outcome) for outcome in outcomes if outcome.wrong)]
    return '\n'.join(lines)


def _row(name: str, runs: Sequence[Outcome]) -> str:
    """Return a row of the table; of each property, how many have it of those that could."""

    def share(column: Sequence[str], able: Sequence[Outcome]) -> str:
        good = [outcome for outcome in able if not any(what in column for what, _ in outcome.wrong)]
        return f'{len(good)}/{len(able)}' if able else '-'

    struck = [outcome for outcome in runs if outcome.struck]
    ended = [outcome for outcome in struck if outcome.status is not None]
    seeds = ' '.join(str(outcome.fault.seed) for outcome in runs)
    named = [outcome for outcome in ended if KINDS[outcome.fault.kind].end not in (GOES_ON, LEAVES)]
    cells = [
        name,
        str(len(runs)),
        str(len(struck)),
        share(['in time'], struck),
        share(['named'], named),
        share(['checkpoint'], [outcome for outcome in ended if outcome.checkpoint]),
        share(
            ['resumed', 'bits'],
            [outcome for outcome in ended if outcome.resumed or outcome.status == 0],
        ),
        seeds if name != 'all' else '',
    ]
    return '| ' + ' | '.join(cells) + ' |'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--count', type=int, default=20, help='number of seeds, from --first on')
    parser.add_argument('--first', type=int, default=0)
    parser.add_argument('--seed', type=int, nargs='*', help='these seeds alone')
    parser.add_argument(
        '--files',
        action='store_true',
        help='of the seeds from --first on, those of files and validations alone',
    )
    parser.add_argument(
        '--cards', action='store_true', help='the faults over simulated cards, instead of seeds'
    )
    parser.add_argument('--jobs', type=int, default=2, help='runs at a time')
    parser.add_argument('--out', type=Path, default=Path(tempfile.gettempdir(), 'mapsage-faults'))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    def tell(outcome: Outcome) -> None:
        print(outcome, flush=True)
        if outcome.wrong or args.seed or args.cards:
            (args.out / f'{outcome.fault.seed}.log').write_text(f'{outcome}\n\n{outcome.output}')

    seeds = args.seed or range(args.first, args.first + args.count)
    if args.files:
        seeds = list(
            islice(
                (seed for seed in count(args.first) if draw(seed).kind in FILE_KINDS), args.count
            )
        )
    with tempfile.TemporaryDirectory(prefix='mapsage-faults-') as folder:
        faults = CARD_FAULTS if args.cards else [draw(seed) for seed in seeds]
        outcomes = run_faults(faults, Path(folder), args.jobs, tell)
    (args.out / 'table.md').write_text(table(outcomes) + '\n')
    print(table(outcomes))
    return int(any(outcome.wrong for outcome in outcomes))


if __name__ == '__main__':
    sys.exit(main())
