"""What may break in a launched training or prediction: the kinds of faults, and each seed's fault.

``tests/distributed/planted_faults.py`` makes a fault strike in a process, ``tests/file_faults.py``
changes files, ``tests/fault_runs.py`` runs the fault and judges the end.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from frozen_config import PLAIN
from support import TINY_CONFIG

STEPS, EVERY = 8, 2  # steps of a run, and from one checkpoint to the next
TIMEOUT = 12  # seconds, of the config: how long a rank may be late
SAMPLES = 16  # of the training data

# How a run must end: with an error that names the rank; with the bits of an undisturbed run; by
# leaving with a checkpoint, as it was asked to; with an error that says what is wrong, whoever
# reports it; with such an error or the bits of an undisturbed run; not at all, if it has said what
# it waits for.
NAMED, GOES_ON, LEAVES, REFUSED, HARMLESS, WAITS = (
    'named',
    'goes on',
    'leaves',
    'refused',
    'harmless',
    'waits',
)

# When a fault strikes: while a training runs; between a training and its resume; while scenes are
# mapped.
TRAINING, AT_REST, MAPPING = 'training', 'at rest', 'mapping'

STEP = ('before the step', 'after the step')
AT_VALIDATION = ('before validation', 'in validation', 'scored', 'after validation')
PLANTED = 'this fault was planted'


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        actions: What happens, one of them.
        places: Where it happens, one of them.
        end: How the run must end, or the resumed run if the fault strikes at rest.
        says: Pattern of what the last error says next to the rank; ``{file}`` stands for the file
            (or address) that was struck.
        workers: Workers of the loader; None for any number.
        role: Who is struck: 'any' head rank, 'writer' (rank 0), or an 'encoder'.
        plain: Whether the run has neither sampling nor a feature source.
        spreads: Whether other ranks have the fault too before it is noticed, so that the error need
            not name one.
        pair: Whether two ranks cannot know which of them is struck.
        when: When it strikes: TRAINING, AT_REST or MAPPING.
        scored: Whether the run depends on its validations: ReduceOnPlateauLR, EarlyStoppingHook and
            save_best, with scores that are given.
        deadline: Seconds in which the run must end.
    """

    actions: Tuple[str, ...]
    places: Tuple[str, ...] = STEP
    end: str = NAMED
    says: str = ''
    workers: Optional[int] = None
    role: str = 'any'
    plain: bool = False
    spreads: bool = False
    pair: bool = False
    when: str = TRAINING
    scored: bool = False
    deadline: float = 150.0


_ANYWHERE = ('start', *STEP, 'forward', 'validation', 'moment')

_PROCESS_KINDS: Dict[str, Kind] = {
    # a process ends
    'killed': Kind(('SIGKILL',), (*_ANYWHERE, 'save', 'moment'), says='SIGKILL|signal: Killed'),
    'segmentation fault': Kind(('SIGSEGV',), _ANYWHERE, says='SIGSEGV|Segmentation fault'),
    'aborted': Kind(('abort',), _ANYWHERE, says='SIGABRT'),
    'sys.exit(0)': Kind(('sys.exit 0',), ('start', *STEP, 'forward', 'validation')),
    'sys.exit(3)': Kind(('sys.exit 3',), ('start', *STEP, 'forward', 'validation')),
    'os._exit(0)': Kind(('os._exit 0',), _ANYWHERE),
    'ends at import': Kind(('SIGKILL', 'os._exit 3', 'exception'), ('import',)),
    'never starts': Kind(('hang', 'SIGSTOP'), ('import',)),
    # a loader
    'worker killed': Kind(('SIGKILL',), ('transform',), says='worker', workers=1),
    'idle worker killed': Kind(('kill worker',), says='worker', workers=1),
    'worker stopped': Kind(('SIGSTOP',), ('transform',), workers=1),
    'dead item': Kind(('hang',), ('transform',)),
    'broken sample': Kind(('exception',), ('sample',), says=PLANTED),
    'collate': Kind(('exception',), ('collate',), says=PLANTED),
    'batch shape': Kind(('shape',), ('before the step',), plain=True),
    # an exception
    'hook': Kind(('exception',), ('start', *STEP, 'validation'), says=PLANTED),
    'forward': Kind(('exception',), ('forward',), says=PLANTED),
    'backward': Kind(('exception',), ('backward',), says=PLANTED),
    'optimizer': Kind(('exception',), ('optimizer',), says=PLANTED),
    'metric': Kind(('exception',), ('metric',), says=PLANTED),
    'save': Kind(('exception',), ('save',), says=PLANTED, role='writer'),
    'log': Kind(('exception',), ('log',), says=PLANTED),
    'out of memory': Kind(
        ('MemoryError', 'RuntimeError'),
        (*STEP, 'forward', 'backward'),
        says=r'out of memory|MemoryError',
    ),
    # numbers
    'NaN loss': Kind(('nan',), ('loss',), says=r'\bnan\b|not finite|non-finite'),
    'infinite gradient': Kind(
        ('inf',), ('gradient',), says=r'\binf|not finite|\bnan\b', spreads=True
    ),
    'NaN weight': Kind(('nan',), ('weight',), says=r'\bnan\b|not finite|non-finite'),
    'changed weight': Kind(('add',), ('weight',), says='not equal', pair=True),
    # a process does not continue
    'stopped': Kind(('SIGSTOP',), ('start', *STEP, 'forward', 'validation', 'moment')),
    'stopped, continued late': Kind(('SIGSTOP, continued late',), (*STEP, 'validation')),
    'hang': Kind(('hang',), ('start', *STEP, 'forward', 'optimizer', 'validation')),
    'hang in C': Kind(('hang in C',), ('start', *STEP, 'forward', 'validation')),
    'alone in a collective': Kind(('receive',), ('start', *STEP), says='', spreads=True),
    'closed connections': Kind(('close mesh',), pair=True),
    # machine
    'no descriptors': Kind(
        ('no descriptors',),
        ('before the step',),
        says='Too many open files|open files',
        workers=0,
        plain=True,
    ),
    'full disk': Kind(
        ('small files', 'folders'),
        ('save',),
        says='File too large|directory|checkpoint',
        role='writer',
    ),
    # the run continues
    'slow rank': Kind(('sleep', 'SIGSTOP, continued'), (*STEP, 'forward', 'validation'), GOES_ON),
    'slow item': Kind(('sleep',), ('transform',), GOES_ON),
    'asked to leave': Kind(
        ('SIGTERM', 'SIGUSR1', 'SIGTERM to the launcher', 'SIGUSR1 to the launcher'), STEP, LEAVES
    ),
    # encoders
    'encoder ends': Kind(('SIGKILL', 'os._exit 3', 'exception'), ('encoder',), role='encoder'),
    'encoder hangs': Kind(('hang', 'SIGSTOP', 'nan'), ('encoder',), role='encoder'),
}
# Kinds in which a file is damaged, changed or hostile, a machine lacks something, or a validation
# that was due is lost.
FILE_KINDS: Dict[str, Kind] = {
    # a checkpoint was written, its validation was not recorded
    'killed at a validation': Kind(
        ('SIGKILL', 'os._exit 0', 'SIGSEGV'), AT_VALIDATION, scored=True
    ),
    'validation raises': Kind(
        ('exception', 'RuntimeError'), AT_VALIDATION, scored=True, says='out of memory'
    ),
    # what the machine or the config lacks
    'shared memory refused': Kind(
        ('refuse batches', 'small /dev/shm'),
        ('transform',),
        says='shared memory|shm',
        workers=1,
        plain=True,
    ),
    'no worker to keep': Kind(
        ('in the config', 'override'),
        ('train_dataloader', 'val_dataloader'),
        GOES_ON,
        workers=0,
        plain=True,
    ),
    'no space': Kind(
        ('ENOSPC', 'EDQUOT', 'no inodes'),
        ('scalars.json', '.pth'),
        says='{file}',
        role='writer',
        plain=True,
    ),
    'MASTER_ADDR elsewhere': Kind(
        ('launcher', 'no launcher'),
        ('203.0.113.7', 'no-host.invalid'),
        WAITS,
        says=r"MASTER_ADDR='{file}' stands for .*\bthis machine "
        r'has \S',
        plain=True,
        deadline=60,
    ),
    # between a training and its resume
    'flipped bit': Kind(
        ('weights', 'optimizer', 'pickle', 'directory'),
        ('newest checkpoint', 'two checkpoints'),
        GOES_ON,
        when=AT_REST,
    ),
    'code in a checkpoint': Kind(
        ('meta.config', 'meta.cfg', 'pickle', 'custom imports'),
        ('newest checkpoint',),
        HARMLESS,
        says='{file}',
        when=AT_REST,
    ),
    'best checkpoint elsewhere': Kind(
        ('file', 'folder', 'link', 'kept checkpoints'),
        ('newest checkpoint',),
        HARMLESS,
        says='{file}',
        when=AT_REST,
        scored=True,
    ),
    'hostile values': Kind(
        ('dataset_meta', 'counters', 'message hub', 'hook states'),
        ('newest checkpoint',),
        HARMLESS,
        says='{file}',
        when=AT_REST,
    ),
    'copied work dir': Kind(
        ('original trained on', 'original changed', 'original gone'),
        ('work dir',),
        GOES_ON,
        when=AT_REST,
    ),
    'link in the work dir': Kind(
        ('config', 'last_checkpoint', 'report.html', 'next checkpoint'),
        ('work dir',),
        HARMLESS,
        says='{file}',
        when=AT_REST,
    ),
    'image replaced': Kind(('larger', 'smaller'), ('data',), GOES_ON, when=AT_REST),
    'other samples': Kind(
        ('removed', 'added', 'renamed'), ('data',), REFUSED, says='sample|image', when=AT_REST
    ),
    'other classes': Kind(('swapped',), ('data',), REFUSED, says='class', when=AT_REST),
    # while scenes are mapped with --skip-broken
    'scene vanishes': Kind(('unlink', 'rename'), ('mapping',), when=MAPPING),
    'scene cut': Kind(('cut to the header', 'cut to half', 'emptied'), ('mapping',), when=MAPPING),
    'scene forbidden': Kind(('chmod 0',), ('mapping',), when=MAPPING),
}
KINDS = {**_PROCESS_KINDS, **FILE_KINDS}

SOURCES: List[Optional[str]] = [None, None, 'Local', 'Prefetched', 'Cached', 'Streamed']
LOOPS = {
    'iterations': 'train_cfg.update(max_iters={steps}, val_interval=4)\n',
    'epochs': """
train_dataloader['sampler'] = dict(type='DefaultSampler', shuffle=True)
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs={epochs}, val_interval={val})
""",
}
SAMPLING: Dict[str, List[Dict[str, Any]]] = {
    'none': [],
    'plain': [
        dict(
            type='DynamicSamplingHook',
            score=dict(type='LabelScore'),
            validity=dict(low=0.45),
            max_age=2,
        )
    ],
}
SAMPLING['prefetch'] = [dict(SAMPLING['plain'][0], prefetch=True)]

# Scores of the validations of a run that depends on them. The rate falls after a score that is no
# better, and two of them in a row end the run: nearly any lost validation changes the end.
SCORES = [[0.5, 0.4, 0.4, 0.4], [0.4, 0.3, 0.5, 0.6], [0.5, 0.4, 0.6, 0.3]]
SCENES = 12  # to be mapped

CONFIG = """
custom_imports = dict(imports=['mapsage', 'planted_faults'])
env_cfg = dict(accelerator={accelerator!r}, reduction={reduction!r},
               dist_cfg=dict(timeout={timeout}))
train_pipeline.insert(-1, dict(type='PlantedTransform'))
train_dataloader.update(num_workers={workers}, persistent_workers={persistent},
                        collate_fn=dict(type='planted_collate'))
val_evaluator['type'] = 'PlantedMetric'
default_hooks['checkpoint'] = dict(type='CheckpointHook', **{checkpoint})
default_hooks['device_check'] = dict(type='DeviceCheckHook', interval={every})
default_hooks['report'] = dict(type='RunReportHook')
custom_hooks = [*{sampling}, dict(type='PlantedFault'), dict(type='CheckpointWitness')]
param_scheduler = None
"""
SCORED = """
default_hooks['checkpoint'].update(save_best='mIoU', rule='greater')
custom_hooks += [dict(type='PlantedScore', scores={scores}, every={every}),
                 dict(type='EarlyStoppingHook', monitor='mIoU', rule='greater', min_delta=0.01,
                      patience=2)]
param_scheduler = [dict(type='ReduceOnPlateauLR', monitor='mIoU', rule='greater', patience=0,
                        factor=0.1, by_epoch=True)]
train_cfg.update({train_cfg})
"""
FROZEN = PLAIN + "model['backbone']['type'] = 'PlantedViT'\nfeature_source = {source}\n"


@dataclass
class Fault:
    """A run and what breaks in it."""

    seed: int
    kind: str
    action: str
    place: str
    rank: int = 0
    step: int = 3
    ranks: int = 2
    encoders: int = 0
    source: Optional[str] = None
    fallback: bool = True  # whether heads may encode
    loop: str = 'iterations'
    by_epoch: bool = False  # whether checkpoints are written at the end of epochs
    sampling: str = 'none'
    workers: int = 0
    persistent: bool = False
    batch: int = 2
    again: bool = False  # whether each later item or sample fails too
    delay: float = 0.0  # seconds behind the begin of the step, for the place 'moment'
    accelerator: str = 'cpu'
    scores: Optional[int] = None  # number of the given scores, if the run depends on them

    @property
    def at_rest(self) -> bool:
        return self.kind in KINDS and KINDS[self.kind].when == AT_REST

    @property
    def reduction(self) -> Optional[str]:
        # The sum of a backend over more than two ranks has other bits after DDP has regrouped its
        # buckets, so a resumed run would differ.
        return 'ordered' if self.accelerator != 'cpu' and self.ranks > 2 else None

    @property
    def heads(self) -> int:
        return self.ranks - self.encoders

    @property
    def reference(self) -> Tuple[Any, ...]:
        """What the bits of the run depend on."""
        return (
            self.heads,
            bool(self.source),
            self.loop,
            self.sampling != 'none',
            self.accelerator,
            self.at_rest,
            # Best checkpoints have names of steps or epochs.
            None if self.scores is None else (self.scores, self.by_epoch),
            # The data of these is changed.
            self.seed if self.place == 'data' else None,
        )

    def __str__(self) -> str:
        settings = {
            name: value
            for name, value in asdict(self).items()
            if value and name not in ('seed', 'kind', 'action', 'place', 'rank', 'ranks', 'batch')
        }
        return (
            f'seed {self.seed}: {self.kind} ({self.action}, {self.place}) on rank {self.rank} '
            f'of {self.ranks}, ' + ', '.join(f'{k}={v}' for k, v in settings.items())
        )


# Faults over the simulated cards, whose eccl reports no lost rank: survivors hang in native code.
CARD_FAULTS = [
    Fault(10_000 + index, kind, action, place, rank=1, ranks=ranks, accelerator='sim')
    for index, (kind, action, place, ranks) in enumerate(
        [
            ('killed', 'SIGKILL', 'before the step', 3),
            ('killed', 'SIGKILL', 'forward', 2),
            ('stopped', 'SIGSTOP', 'before the step', 2),
            ('stopped', 'SIGSTOP', 'after the step', 3),
            ('hang', 'hang', 'forward', 2),
            ('hang in C', 'hang in C', 'before the step', 3),
            ('alone in a collective', 'all-reduce on the card', 'after the step', 3),
            ('forward', 'exception', 'forward', 2),
            ('slow rank', 'sleep', 'forward', 2),
        ]
    )
]


def draw(seed: int) -> Fault:
    """Return the fault of a seed; as many seeds in a row as there are kinds have all of them."""
    dice = random.Random(seed)
    name = list(KINDS)[seed % len(KINDS)]
    kind = KINDS[name]
    # Each time that its turn comes, a kind has another action.
    action = kind.actions[seed // len(KINDS) % len(kind.actions)]
    fault = Fault(
        seed,
        name,
        action,
        dice.choice(kind.places),
        step=dice.randrange(STEPS),
        ranks=dice.randint(2, 5),
        loop=dice.choice(list(LOOPS)),
        workers=dice.randrange(2) if kind.workers is None else kind.workers,
    )
    if kind.scored or kind.when != TRAINING:
        return _draw_files(fault, dice)
    # An idle worker is there between two epochs only if it is kept.
    fault.persistent = bool(fault.workers) and (name == 'idle worker killed' or dice.random() < 0.6)
    fault.by_epoch = fault.loop == 'epochs' and dice.random() < 0.5
    if kind.role == 'encoder':
        fault.source = 'Streamed'
    elif not kind.plain:
        fault.source = dice.choice(SOURCES)
    if fault.source == 'Cached' and fault.place in ('transform', 'sample'):
        fault.source = None  # the loader decodes nothing then
    if fault.source == 'Streamed':
        fault.encoders = 2 if fault.ranks > 3 and dice.random() < 0.4 else 1
        fault.fallback = dice.random() < 0.7
        if fault.heads == 1:  # nobody waits for the only rank
            fault.ranks += 1
    elif fault.source != 'Prefetched' and not kind.plain:  # it works ahead, sampling does not
        fault.sampling = dice.choice(list(SAMPLING) if fault.workers else ['none', 'plain'])
    fault.rank = dice.randrange(fault.heads)
    if kind.role == 'encoder':
        fault.rank = dice.randrange(fault.heads, fault.ranks)
        fault.step, fault.again = dice.randrange(3), dice.random() < 0.5
    if kind.role == 'writer' or fault.place == 'save':  # rank 0 alone writes
        fault.rank = 0
    if fault.place == 'sample':
        fault.step = dice.randrange(SAMPLES)  # the number of the sample
        fault.again = True  # as a broken file is
    if fault.place == 'moment':
        fault.delay = round(dice.random() * 0.5, 3)
    if name == 'closed connections':  # those of the first step are still being made
        fault.step = max(fault.step, 2)
    if fault.action == 'small /dev/shm':  # its ranks start from nothing, which takes long
        fault.ranks = min(fault.ranks, 3)
        fault.rank %= fault.ranks
    if fault.action == 'no inodes' and fault.place == 'scalars.json':
        fault.step = 0  # later it is there
    if name == 'asked to leave':  # the last steps end the run anyway
        fault.step = min(fault.step, STEPS - 3)
    return fault


def _draw_files(fault: Fault, dice: random.Random) -> Fault:
    """Complete a fault of files or validations: its run is small, what strikes is not."""
    kind = KINDS[fault.kind]
    fault.ranks = dice.randint(1, 3) if kind.when == MAPPING else dice.randint(2, 3)
    fault.rank = dice.randrange(fault.ranks)
    if kind.scored:
        fault.scores = dice.randrange(len(SCORES))
        fault.step = dice.randrange(3)  # number of the validation; the last has no resume
        fault.by_epoch = fault.loop == 'epochs' and dice.random() < 0.5
    if kind.when != TRAINING:
        fault.workers, fault.step = 0, dice.randrange(3)
        # After the resume, a better score than the stored one is due.
        fault.scores = 1 if kind.scored else None
        fault.by_epoch = False
    if kind.when == MAPPING:
        fault.loop = ''
    elif not kind.scored:
        fault.sampling = 'plain'
    return fault


def config_of(fault: Fault, data: Path, cache: Path) -> str:
    """Return the text of the run's config."""
    epoch = -(-SAMPLES // (2 * fault.heads))  # steps
    # A fault at rest finds the checkpoints of the whole run.
    kept = 9 if fault.at_rest else 1
    text = TINY_CONFIG.replace('{data_root!r}', repr(str(data))) + CONFIG.format(
        timeout=TIMEOUT,
        accelerator=fault.accelerator,
        reduction=fault.reduction,
        workers=fault.workers,
        persistent=fault.persistent,
        every=EVERY,
        sampling=SAMPLING[fault.sampling],
        checkpoint=dict(
            by_epoch=fault.by_epoch,
            max_keep_ckpts=kept,
            interval=-(-EVERY // epoch) if fault.by_epoch else EVERY,
        ),
    )
    text += LOOPS[fault.loop].format(steps=STEPS, epochs=-(-STEPS // epoch), val=-(-4 // epoch))
    if fault.scores is not None:
        scores = SCORES[fault.scores]
        text += SCORED.format(
            scores=scores,
            every=epoch if fault.loop == 'epochs' else EVERY,
            train_cfg=dict(max_epochs=len(scores), val_interval=1)
            if fault.loop == 'epochs'
            else dict(max_iters=EVERY * len(scores), val_interval=EVERY),
        )
    if fault.source:
        source: Dict[str, Any] = dict(type=fault.source)
        if fault.source == 'Cached':
            source['folder'] = str(cache)
        if fault.source == 'Streamed':
            # shorter than the others wait for a head that waits for an encoder
            source.update(
                encoders=fault.encoders,
                timeout=TIMEOUT / 2,
                peer_timeout=TIMEOUT / 2,
                local_fallback=fault.fallback,
            )
        text += FROZEN.format(source=source)
    return text


def may_go_on(fault: Fault) -> bool:
    """Return whether the run may succeed without the encoder that fails."""
    return (
        fault.place == 'encoder'
        and fault.action in ('hang', 'SIGSTOP', 'exception', 'nan')
        and (fault.fallback or fault.encoders > 1)
    )
