"""Passports: which pixels a model was trained on, and how scenes differ from them.

A passport is JSON: ``version``, ``units``, ``classes`` (shares) and ``parts``, which describe the
images of single scenes (``''``) or of each sensor. It has no paths. :func:`compare` finds what is
certainly wrong (an error) and what is unusual (a warning). The thresholds were set on generated
scenes; `tools/benchmarks/passport.py` measures them on scenes that nobody has seen.

Shapes:
    quantiles   (bands, quantiles), as ``scene_facts.sample_quantiles`` returns them
"""

from __future__ import annotations

import math
import os
import time
from typing import (
    Any,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np

from .scene_facts import QUANTILES, STORED, Sampled, SceneFacts, Unit, are_close
from .sensor_rules import SENTINEL2, SHIFT

VERSION = 1
# Pixels that are larger or smaller by this factor show other objects.
_PIXEL_FACTOR = 1.5
# Days by which a scene may lie outside the days of the training.
_MONTH, _YEAR = 31, 366
# Distance of quantiles from which on a scene is unlike the training, and from which on its bands
# may be swapped, if another order explains so much of the distance.
_FAR, _SWAPPED, _EXPLAINED = 2.6, 1.0, 0.5
# Factor of values that light and ground hardly explain, and factor that they never explain.
_OTHER_UNIT, _CERTAIN_UNIT = 8, 100
# Share of a band's range that a quantile may differ from the mean of training without counting.
_SLACK = 0.35
_TEXTS = ('dtypes', 'sensors', 'levels', 'baselines')


class Finding(NamedTuple):
    """A difference between a scene and a passport.

    Attributes:
        kind: ``'offset'``, ``'unit'``, ``'level'``, ``'bands'``, ``'pixel'``, ``'depth'``,
            ``'contrast'``, ``'sensor'``, ``'season'``, ``'doubt'`` or ``'unlike'``.
        text: Sentence with the next step.
        is_error: Whether the difference is certainly wrong.
    """

    kind: str
    text: str
    is_error: bool = False


def describe_part(scenes: Sequence[SceneFacts], quantiles: Sequence[np.ndarray]) -> Dict[str, Any]:
    """Return the part of a passport on some scenes of one kind.

    Args:
        scenes: Facts of the scenes, which are read in one unit.
        quantiles: Quantiles of some of them.
    """
    pixels = sorted(facts.pixel for facts in scenes if facts.pixel is not None)
    stated = {facts.units for facts in scenes} - {None}
    stack = np.array([rows for rows in quantiles if np.isfinite(rows).all()])
    return dict(
        scenes=len(scenes),
        pixel=[pixels[number] for number in (0, len(pixels) // 2, -1)] if pixels else None,
        bands=next((list(facts.names) for facts in scenes if facts.names), None),
        units=next((facts.read_as for facts in scenes), STORED),
        unit=np.array(stated.pop()).tolist() if len(stated) == 1 else None,
        **{
            # The singular is the name of the fact.
            name: sorted({getattr(facts, name[:-1]) for facts in scenes} - {None})
            for name in _TEXTS
        },
        days=sorted({_day_of_year(facts.day) for facts in scenes} - {0}),
        quantiles=dict(
            shares=list(QUANTILES),
            scenes=len(stack),
            **{
                name: [[float(f'{value:.6g}') for value in row] for row in rows]
                for name, rows in (('mean', stack.mean(0)), ('spread', stack.std(0)))
            },
        )
        if len(stack)
        else None,
    )


def passport_of_checkpoint(meta: object, path: str) -> Tuple[Optional[Dict[str, Any]], str]:
    """Return the passport in a checkpoint's ``meta``, and '' or the reason why it has none."""
    record = meta.get('data') if isinstance(meta, Mapping) else None
    return read_passport(record.get('passport') if isinstance(record, Mapping) else None, path)


def read_passport(stored: object, source: str) -> Tuple[Optional[Dict[str, Any]], str]:
    """Return the passport in a file, and '' or why scenes cannot be compared with it.

    Args:
        stored: What the file has in the passport's place; anybody may have written it.
        source: Name of the file.
    """
    if stored is None:
        return None, f'{source} has no passport, so scenes are not compared with its training.'
    version = stored.get('version') if isinstance(stored, Mapping) else None
    if isinstance(version, int) and version > VERSION:
        return None, (
            f'the passport of {source} has version {version}, and this MapSage reads up to '
            f'{VERSION}: scenes are not compared with its training. Update MapSage.'
        )
    try:
        if isinstance(stored, Mapping) and all(map(_is_part, stored['parts'].values())):
            return dict(stored), ''
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        # Values of other types, which the comparisons cannot take.
        pass
    return None, f'the passport of {source} is damaged, so scenes are not compared with it.'


def _is_part(trained: Mapping[str, Any]) -> bool:
    """Return whether a part has the values that a comparison needs.

    Raises:
        KeyError, OverflowError, TypeError, ValueError: If one is missing or no such value.
    """
    # What a part may lack is replaced by values that pass.
    quantiles = trained['quantiles'] or dict(mean=[QUANTILES], spread=[QUANTILES], scenes=1)
    rows = np.array([quantiles['mean'], quantiles['spread']], np.float64)
    low, middle, high = trained['pixel'] or (1, 1, 1)
    texts = [trained['units'], *(trained['bands'] or ())]
    for key in _TEXTS:
        texts += trained[key]
    return (
        rows.shape[2:] == (len(QUANTILES),)
        and bool(rows.size and np.isfinite(rows).all() and (rows[1] >= 0).all())
        and int(quantiles['scenes']) > 0
        and min(low, middle, high) > 0
        and all(abs(scale) > 0 and offset < math.inf for scale, offset in trained['unit'] or ())
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(day, int) for day in trained['days'])
    )


def compare(
    trained: Mapping[str, Any],
    facts: SceneFacts,
    quantiles: Optional[np.ndarray],
    compares_pixel: bool = True,
) -> List[Finding]:
    """Return how a scene differs from the part of a passport, the gravest difference first.

    Args:
        trained: Part of a passport.
        facts: Facts of the scene.
        quantiles: Quantiles of the scene as the model sees it; None to compare the facts only.
        compares_pixel: Whether the scene is seen in the size of its file.
    """
    stated = _compare_units(trained, facts)
    findings = list(_compare_facts(trained, facts, compares_pixel))
    if quantiles is not None and np.isfinite(quantiles).all():
        shown = _compare_quantiles(trained, facts, quantiles)
        if stated is not None and shown is None and trained['quantiles'] is not None:
            # Which of the two is wrong is unknown.
            doubt = (
                ' But its pixels are like those of training, so that the statement may be wrong.'
            )
            stated = Finding(stated.kind, stated.text + doubt)
        elif shown is not None and (stated is None or shown.kind in ('depth', 'bands')):
            findings.append(shown)
        findings += (Finding('doubt', text) for text in doubts_of_pixels(facts, quantiles))
    findings = [*filter(None, [stated]), *findings]
    return sorted(findings, key=lambda finding: not finding.is_error)


def _compare_units(trained: Mapping[str, Any], facts: SceneFacts) -> Optional[Finding]:
    if not (trained['unit'] and facts.units) or trained['units'] != facts.read_as:
        return None
    expected, actual = Unit(*trained['unit'][0]), facts.units[0]
    if are_close([expected], [actual]):
        return None
    kind = 'offset'
    if not math.isclose(expected.scale, actual.scale, rel_tol=1e-4):
        other_level = trained['levels'] and facts.level not in (None, *trained['levels'])
        kind = 'level' if other_level else 'unit'
    return Finding(
        kind,
        f'{facts.path} has {facts.unit_text}, and training had {expected}: the same '
        f'ground has other values. Set --units harmonized if it is the offset of newer baselines of '
        f"Sentinel-2; or train with units='reflectance'.",
        True,
    )


def _compare_facts(
    trained: Mapping[str, Any], facts: SceneFacts, compares_pixel: bool
) -> Iterator[Finding]:
    low, middle, high = trained['pixel'] or (0, 0, math.inf)
    sizes = f'{low:.3g} m' if high <= low * 1.01 else f'{low:.3g} to {high:.3g} m'
    side = facts.pixel if compares_pixel else middle
    if side is None and middle:
        text = (
            f'{facts.path} has no CRS: whether its pixels have the {sizes} of training is unknown.'
        )
        yield Finding('pixel', text)
    elif side and not low / _PIXEL_FACTOR <= side <= high * _PIXEL_FACTOR:
        yield Finding(
            'pixel',
            f'{facts.path} has pixels of {side:.3g} m, and training had {sizes}, so its objects '
            f'have other sizes. Set --gsd auto to let the model see pixels of {middle:.3g} m, or '
            f'--trust-scenes to map it as it is.',
            True,
        )
    for kind in ('sensor', 'level'):
        value, known = getattr(facts, kind), trained[f'{kind}s']
        if value is not None and known and value not in known:
            text = f'{facts.path} has the {kind} {value}, and training had {", ".join(known)}.'
            yield Finding(kind, text)
    day = _day_of_year(facts.day)
    if day and trained['days']:
        nearest = days_apart(trained['days'], day).min()
        if nearest > _MONTH:
            yield Finding(
                'season',
                f'{facts.path} is of day {day} of the year, {nearest} days outside those of '
                f'training: another season.',
            )
    for text in facts.doubts:
        yield Finding('doubt', f'{text}.')


def days_apart(days: Sequence[int], day: int) -> np.ndarray:
    """Return the distances (N,) of days of the year from a day, the short way around."""
    apart = np.abs(np.array(days) - day)
    return np.minimum(apart, _YEAR - apart)


def _day_of_year(day: Optional[str]) -> int:
    try:
        return time.strptime(day or '', '%Y%m%d').tm_yday
    except ValueError:
        return 0


def doubts_of_pixels(facts: SceneFacts, quantiles: np.ndarray) -> Iterator[str]:
    """Yield sentences on statements that the pixels contradict, each with both readings."""
    if facts.units is None:
        return
    unit = facts.units[0]
    scales, offsets = np.array(facts.units).T
    # Dark water is a little below 0 in many good scenes.
    if (quantiles[:, QUANTILES.index(0.1)] * scales + offsets < 0.2 * offsets).any():
        yield (
            f'{facts.path} states {unit}, which makes a tenth of its pixels negative: either '
            f'the offset has been taken off its values already, or the offset is wrong.'
        )
    darkest = quantiles[:, 0].min() / (1 if facts.read_as == STORED else 1e-4)
    is_sentinel2 = facts.sensor == SENTINEL2 or abs(unit.scale - 1e-4) < 1e-9
    if is_sentinel2 and unit.offset == 0 and 900 < darkest < 1250:
        yield (
            f'{facts.path} states the offset 0, and its darkest pixels are {darkest:.0f}: '
            f'either it shows no dark ground, or its values have the 1,000 of newer baselines.'
        )


def _compare_quantiles(
    trained: Mapping[str, Any], facts: SceneFacts, rows: np.ndarray
) -> Optional[Finding]:
    stored = trained['quantiles']
    if stored is None or len(stored['mean']) != len(rows):
        return None
    mean, spread = np.array(stored['mean']), np.array(stored['spread'])
    # A few scenes say little about how much scenes differ.
    few = 1 / int(stored['scenes'])
    ranges = np.maximum(mean[:, -2:-1] - mean[:, 1:2], 0.1 * np.abs(mean).max() + 1e-12)
    usual = np.sqrt(spread**2 * (1 + 2 * few) + (_SLACK * (1 + few) * ranges) ** 2)
    # Mean distance of each band from each band of training, in units of usual differences.
    distances = (np.abs(rows - mean[:, None]) / usual[:, None]).mean(2)
    distance = distances.trace() / len(rows)
    whole = 'Compare how the file and those of training were made.'
    largest = 255 if facts.dtype == 'uint8' else 65535 if facts.dtype == 'uint16' else None
    if facts.dtype == 'uint8' and 'uint8' not in trained['dtypes'] and trained['dtypes']:
        return Finding(
            'depth',
            f'{facts.path} has 8 bits (values to {rows.max():.4g}), and training had '
            f'{", ".join(trained["dtypes"])} (to {mean.max():.4g}): take the file in its own bits.',
            mean[:, -1].max() > 300,
        )
    if (
        largest
        and (rows[:, 0] <= 0.02 * largest).all()
        and (rows[:, -1] >= 0.98 * largest).all()
        and not ((mean[:, 0] <= 0.04 * largest) & (mean[:, -1] >= 0.94 * largest)).all()
    ):
        return Finding(
            'contrast',
            f'{facts.path} has values from {rows[:, 0].min():.4g} to {rows[:, -1].max():.4g} in each band, '
            f'all that {facts.dtype} holds: its contrast was stretched. {whole}',
        )
    # Geometric means over the bands, so that no band decides.
    expected, actual = (
        np.log(np.abs(values[:, 4:]).mean(1) + 1e-12).mean() for values in (mean, rows)
    )
    ratio = math.exp(actual - expected)
    if rows.any() and not 1 / _OTHER_UNIT < ratio < _OTHER_UNIT:
        return Finding(
            'unit',
            f'{facts.path} has values {ratio:.3g} times those of training (medians '
            f'{_format(rows[:, 4])}, training {_format(mean[:, 4])}): another unit. Set --units, '
            f'or scale the file.',
            # Open water is 10 to 30 times darker than a desert.
            not 1 / _CERTAIN_UNIT < ratio < _CERTAIN_UNIT,
        )
    shift = _shift(rows, mean, spread)
    if shift:
        return Finding(
            'offset',
            f'{facts.path} has values {abs(shift):.4g} {"above" if shift > 0 else "below"} those of '
            f'training in all bands (darkest {_format(rows[:, 0])}, training '
            f'{_format(mean[:, 0])}): the offset of newer baselines of Sentinel-2 is in one of '
            f'them only, though nothing states it. Set --units harmonized, and state scale and offset '
            f'in the file (gdal_edit.py -scale 0.0001 -offset -0.1).',
        )
    if distance > _SWAPPED:
        # Few scenes get here, and the import takes a while.
        from scipy.optimize import linear_sum_assignment

        order = linear_sum_assignment(distances)[1]
        if distances[range(len(rows)), order].mean() < _EXPLAINED * distance:
            named = f', though they are named {", ".join(facts.names)}' * bool(facts.names)
            return Finding(
                'bands',
                f'{facts.path} fits the training with its bands in the order '
                f'{", ".join(map(str, order + 1))}, so its bands may be swapped{named}. Name them '
                f'(rio edit-info), or choose them with --bands.',
            )
    if distance > _FAR:
        return Finding(
            'unlike',
            f'{facts.path} has other values than training (medians {_format(rows[:, 4])}, training '
            f'{_format(mean[:, 4])}): another sensor, season or contrast. {whole}',
        )
    return None


def _shift(rows: np.ndarray, mean: np.ndarray, spread: np.ndarray) -> float:
    """Return the 1,000 of Sentinel-2 by which the dark ends of all bands differ, or 0."""
    brightness = float(np.median(mean[:, 4]))
    # Values are digital numbers of reflectance, or reflectance.
    step = SHIFT if 100 < brightness < 9000 else SHIFT * 1e-4 if 0.01 < brightness < 0.9 else 0.0
    if not step:
        return 0.0
    shifts = (rows - mean)[:, :2].mean(1)
    sign = 1.0 if np.median(shifts) > 0 else -1.0
    near = np.abs(shifts * sign / step - 1)
    usual = spread[:, :2].mean(1) / step
    return sign * step if np.median(near) < 0.3 and (near < 0.4 + usual).all() else 0.0


def _format(values: np.ndarray) -> str:
    return '/'.join(f'{value:.4g}' for value in values[:6]) + '/...' * (len(values) > 6)


def compare_scenes(scenes: Sequence[SceneFacts], sampled: Sequence[Sampled]) -> Iterator[str]:
    """Yield how scenes of one training differ from each other, a sentence for each kind.

    A scene is compared with the passport of the others, of whose differences only those with a
    known cause count.

    Args:
        scenes: Facts of all scenes.
        sampled: Facts and quantiles of some of them.
    """
    pixels = sorted((facts.pixel, facts.path) for facts in scenes if facts.pixel is not None)
    if pixels and pixels[-1][0] > _PIXEL_FACTOR * pixels[0][0]:
        (low, finest), (high, coarsest) = pixels[0], pixels[-1]
        yield (
            f'{finest} has pixels of {low:.3g} m and {coarsest} of {high:.3g} m, so objects have '
            f'different sizes: resample the scenes to one size, or train on them apart.'
        )
    sampled = [sample for sample in sampled if np.isfinite(sample[1]).all()]
    kinds = {'offset', 'unit', 'bands'}
    for number, (facts, rows) in enumerate(sampled):
        rest = [*sampled[:number], *sampled[number + 1 :]]
        finding = _compare_quantiles(describe_part(*zip(*rest)), facts, rows) if rest else None
        if finding is not None and finding.kind in kinds:
            kinds.remove(finding.kind)
            yield finding.text.replace('training', 'the other scenes')
        yield from doubts_of_pixels(facts, rows)


def describe_mixture(scenes: Sequence[SceneFacts]) -> Iterator[str]:
    """Yield what differs between the facts of scenes: baselines, offsets, levels; and doubts."""
    by_unit = {facts.units[0]: facts for facts in scenes if facts.units}
    for name, examples in (
        ('scale or offset', {facts.unit_text: facts for facts in by_unit.values()}),
        ('level', {facts.level: facts for facts in scenes if facts.level}),
        ('sensor', {facts.sensor: facts for facts in scenes if facts.sensor}),
    ):
        if len(examples) > 1:
            listed = ', '.join(
                f'{value} ({os.path.basename(facts.path)})' for value, facts in examples.items()
            )
            yield f'images differ in their {name}: {listed}'
    doubts = list(dict.fromkeys(doubt for facts in scenes for doubt in facts.doubts))
    yield from doubts[:3]
    if len(doubts) > 3:
        yield f'{len(doubts) - 3} more files have such statements'
