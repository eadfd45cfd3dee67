"""The tables and the last lines of `mapsage tune CONFIG`."""

from __future__ import annotations

import argparse
import shlex
from typing import Any, Dict, List, Mapping, Optional

from mapsage.distributed.strategy import format_bytes
from mapsage_launcher.shipped import program

from .options import Variant
from .race import Race, Speed, Standing

# Relative change of the loss that deserves a sentence.
_LARGE_CHANGE = 0.05


def format_rows(
    race: Race,
    title: str,
    names: Mapping[Variant, str],
    obstacles: Optional[Mapping[str, str]] = None,
) -> List[str]:
    """Return the table of a race.

    Args:
        race: The race, after its rounds.
        title: Heading of the first column.
        names: Names of the variants, the config as it is first; those without a result are listed
            with the reason.
        obstacles: Reasons by the name of an option that cannot be tried.
    """
    base = race.standings[race.base]
    updates = base.visits[0].updates
    width = max(24, *(len(name) for name in names.values()), *map(len, obstacles or ['']))
    lines = [
        f'  {title:<{width}} {"ms":>8} {"speed":>6} {"spread":>7} {"memory":>10}  '
        f'loss after {updates} update(s)'
    ]
    for variant, name in names.items():
        standing = race.standings.get(variant)
        if standing is None:
            lines.append(f'  {name:<{width}} not measured: the two minutes are over')
        elif standing.failure:
            lines.append(f'  {name:<{width}} fails: {standing.failure}')
        else:
            lines.append(f'  {name:<{width}} {_result(race, variant, standing, base)}')
    lines += [f'  {name:<{width}} {reason}' for name, reason in (obstacles or {}).items()]
    return lines


def format_workers(race: Race, configured: int) -> List[str]:
    """Return the table of loader workers.

    Args:
        race: The race, after its rounds.
        configured: Number of workers of the config.
    """
    lines = [f'  {"workers":<24} {"ms":>8} {"speed":>6} {"spread":>7}  from batch to batch']
    for variant, standing in sorted(race.standings.items(), key=lambda item: item[0].workers or 0):
        name = f'{variant.workers}' + ' (now)' * (variant.workers == configured)
        if standing.failure:
            lines.append(f'  {name:<24} fails: {standing.failure}')
        else:
            lines.append(f'  {name:<24} {_speed(race, variant, standing)}')
    return lines


def _result(race: Race, variant: Variant, standing: Standing, base: Standing) -> str:
    last, reference = standing.visits[0], base.visits[0]
    memory = '-' if last.bytes is None else format_bytes(last.bytes)
    loss = f'{last.loss:.5g}'
    if variant != race.base:
        change = (last.loss - reference.loss) / max(abs(reference.loss), 1e-12)
        loss = f'{change:+.2%}' + (
            ', large: compare the scores of two runs' if abs(change) > _LARGE_CHANGE else ''
        )
    if last.updates != reference.updates:
        loss = '-'
    return f'{_speed(race, variant, standing)} {memory:>10}  {loss}'


def _speed(race: Race, variant: Variant, standing: Standing) -> str:
    if variant == race.base:
        speed = Speed(1.0, race.noise)
    else:
        speed = standing.speed
    spread = 'once' if speed.spread == float('inf') else f'{speed.spread:.2f}'
    return f'{1000 * standing.seconds:>8.1f} {speed.gain:>6.2f} {spread:>7}'


def command_line(
    args: argparse.Namespace, base: Variant, best: Variant, gain: Optional[Speed], noise: float
) -> str:
    """Return the result: the line to type, or that the config is best as it is.

    Args:
        args: Options of the doctor.
        base: The config as it is.
        best: The variant to use.
        gain: Speed of the options of the step; None if none of them gained.
        noise: Deviation from 1 that equal work showed.
    """
    if not best.options and best.threads == base.threads:
        return (
            f'result: keep the config as it is. No option gained more than the spread of the '
            f'measurement (noise {noise:.2f})'
        )
    fact = '' if gain is None else f', its step {gain.gain:.2f} times as fast (±{gain.spread:.2f})'
    threads = '' if best.threads == base.threads else f'OMP_NUM_THREADS={best.threads} '
    words = [program('train'), shlex.quote(str(args.config))]
    if args.accelerator:
        words += ['--accelerator', args.accelerator]
    changes: Dict[str, Any] = {**(args.cfg_options or {}), **best.changes}
    if changes:
        words += [
            '--cfg-options',
            *(shlex.quote(f'{key}={value}') for key, value in changes.items()),
        ]
    return f'result: train with{fact}\n  {threads}{" ".join(words)}'
