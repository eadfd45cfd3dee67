"""Passports, and what they find in scenes that are unlike the training."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Dict, List, Sequence, Set

import numpy as np
import pytest

from mapsage.geo import GeoError
from mapsage.geo.passport import (
    VERSION,
    Finding,
    compare,
    compare_scenes,
    describe_mixture,
    describe_part,
    passport_of_checkpoint,
    read_passport,
)
from mapsage.geo.scene_facts import QUANTILES, SceneFacts, Unit, check_one_unit, convert

OLD, NEW = (Unit(1e-4, 0.0),) * 4, (Unit(1e-4, -0.1),) * 4
FACTS = SceneFacts(
    '/secret/a.tif', 10.0, ('B02', 'B03', 'B04', 'B08'), 'uint16', OLD, 'sentinel-2', 'L2', '03.01',
    '20210610',
)  # fmt: skip
PLAIN = replace(FACTS, names=(), units=None, sensor=None, level=None, baseline=None, day=None)


def quantiles(seed: int, *changes: Any) -> np.ndarray:
    """Return quantiles of a scene: values are darker in the first bands, and differ by scene."""
    random = np.random.RandomState(seed)
    values = random.gamma(4, 1, (4, 4000)) * np.array([60, 110, 160, 600])[:, None]
    values = values * random.uniform(0.9, 1.1) + random.uniform(0, 60)
    for change in changes:
        values = change(values)
    return np.quantile(values, QUANTILES, axis=1).T


def passport(facts: SceneFacts = FACTS, count: int = 6) -> Dict[str, Any]:
    rows = [quantiles(seed) for seed in range(count)]
    part = describe_part([facts] * count, rows)
    stored = json.loads(json.dumps(dict(version=VERSION, parts={'': part}, classes={})))
    return read_passport(stored, 'x')[0]['parts']['']  # type: ignore[index]


def kinds(findings: Sequence[Finding]) -> Set[str]:
    return {finding.kind for finding in findings}


def test_a_passport_says_what_the_scenes_are() -> None:
    part = passport()
    assert part['bands'] == list(FACTS.names) and part['unit'] == [[1e-4, 0.0]] * 4
    assert (
        part['pixel'] == [10, 10, 10] and part['days'] == [161] and part['baselines'] == ['03.01']
    )
    assert 'secret' not in json.dumps(part)


@pytest.mark.parametrize('facts', [FACTS, PLAIN])
def test_scenes_like_the_training_are_not_mentioned(facts: SceneFacts) -> None:
    assert not [
        compare(passport(), facts, quantiles(seed))
        for seed in range(50, 90)
        if compare(passport(), facts, quantiles(seed))
    ]


def raised(values: np.ndarray) -> np.ndarray:
    return values + 1000


def stretched(values: np.ndarray) -> np.ndarray:
    low, high = np.percentile(values, (2, 98), axis=1, keepdims=True)
    return np.clip((values - low) / (high - low), 0, 1) * 65535


def test_the_contrast_of_the_training_is_not_mentioned() -> None:
    def saturated(values: np.ndarray) -> np.ndarray:
        """Return values from 0 to a third of the range, and the brightest 5 % at its end."""
        low, high = np.percentile(values, (2, 95), axis=1, keepdims=True)
        return np.where(values > high, 65535, (values - low).clip(0) / (high - low) * 20000)

    part = describe_part([PLAIN] * 6, [quantiles(seed, saturated) for seed in range(6)])
    assert 'contrast' not in kinds(compare(part, PLAIN, quantiles(50, saturated)))
    assert 'contrast' in kinds(compare(passport(PLAIN), PLAIN, quantiles(50, saturated)))


@pytest.mark.parametrize(
    ('kind', 'change'),
    [
        ('offset', raised),
        ('unit', lambda values: values * 1e-4),
        ('unit', lambda values: values * 20),
        ('bands', lambda values: values[[3, 1, 2, 0]]),
        ('contrast', stretched),
    ],
)
def test_pixels_without_metadata_show_it(kind: str, change: Any) -> None:
    part = passport()
    named = [kind in kinds(compare(part, PLAIN, quantiles(seed, change))) for seed in range(50, 70)]
    assert sum(named) >= 18


@pytest.mark.parametrize(
    ('kind', 'is_error', 'change'),
    [
        ('offset', True, dict(units=NEW, baseline='05.09')),
        ('level', True, dict(units=(Unit(2.75e-5, -0.2),) * 4, level='L1')),
        ('unit', True, dict(units=(Unit(2e-4, 0.0),) * 4)),
        ('pixel', True, dict(pixel=15.1)),
        ('pixel', True, dict(pixel=6.6)),
        ('pixel', False, dict(pixel=None)),
        ('sensor', False, dict(sensor='landsat-oli')),
        ('level', False, dict(level='L1')),
        ('season', False, dict(day='20210801')),
        ('season', False, dict(day='20211224')),
        ('doubt', False, dict(doubts=('two tags',))),
    ],
)
def test_facts_that_differ(kind: str, is_error: bool, change: Dict[str, Any]) -> None:
    (finding, *_) = compare(passport(), replace(FACTS, **change), None)
    assert (finding.kind, finding.is_error) == (kind, is_error)
    assert kind == 'doubt' or '/secret/a.tif' in finding.text


def test_differences_that_are_none() -> None:
    part = passport()
    for change in (dict(pixel=14.9), dict(day='20220711'), dict(day='20219999')):
        assert not compare(part, replace(FACTS, **change), None)
    assert not compare(part, replace(FACTS, pixel=None), None, compares_pixel=False)
    assert not compare(dict(part, pixel=None), replace(FACTS, pixel=None), None)
    # Read in another unit than the training's, and with the offset taken off.
    new, _ = convert(replace(FACTS, units=NEW), 'harmonized')
    assert not compare(part, replace(new, pixel=99, units=NEW), None, compares_pixel=False)
    assert not compare(dict(part, units='harmonized'), new, quantiles(60))


def test_a_statement_that_the_pixels_contradict_is_no_error() -> None:
    new = replace(FACTS, units=NEW)
    (finding, *_) = compare(passport(), new, quantiles(60, raised))
    assert finding.is_error and '--units harmonized' in finding.text
    findings = compare(passport(), new, quantiles(60))
    assert kinds(findings) == {'offset', 'doubt'} and not any(f.is_error for f in findings)
    assert 'may be wrong' in findings[0].text
    assert any('a tenth of its pixels negative' in finding.text for finding in findings)
    (doubt,) = [f for f in compare(passport(), FACTS, quantiles(60, raised)) if f.kind == 'doubt']
    assert 'states the offset 0' in doubt.text


def test_eight_bits() -> None:
    facts = replace(PLAIN, dtype='uint8')
    (finding,) = compare(passport(), facts, quantiles(60, lambda values: values / 40))
    assert finding.kind == 'depth' and finding.is_error


@pytest.mark.parametrize(
    'stored',
    [
        3, [], {}, dict(version=1), dict(version=1, parts=3), dict(version=1, parts={'': {}}),
        dict(version=1, parts={'': dict(passport(), pixel=[0, 1, 1])}),
        dict(version=1, parts={'': dict(passport(), pixel=[1])}),
        dict(version=1, parts={'': dict(passport(), unit=[[0, 1]])}),
        dict(version=1, parts={'': dict(passport(), unit=[['1', '0']])}),
        dict(version=1, parts={'': dict(passport(), pixel=[1, 'x', 1])}),
        dict(version=1, parts={'': dict(passport(), bands=[3])}),
        dict(version=1, parts={'': dict(passport(), days=['x'])}),
        dict(version=1, parts={'': dict(passport(), quantiles=dict(mean=[[1]], spread=[[1]], scenes=1))}),
        dict(version=1, parts={'': dict(passport(), quantiles=dict(mean=[], spread=[], scenes=0))}),
    ],
)  # fmt: skip
def test_a_damaged_passport(stored: object) -> None:
    found, problem = read_passport(stored, 'a.pth')
    assert found is None and 'damaged' in problem


def test_no_passport_and_a_newer_one() -> None:
    for meta in (None, {}, dict(data=None), dict(data=dict(samples=3)), 'text'):
        found, problem = passport_of_checkpoint(meta, 'a.pth')
        assert found is None and 'a.pth has no passport' in problem
    found, problem = read_passport(dict(version=VERSION + 1, parts=3), 'a.pth')
    assert found is None and f'version {VERSION + 1}' in problem


def test_scenes_of_one_training() -> None:
    def said(facts: List[SceneFacts], rows: List[np.ndarray]) -> str:
        return ' | '.join(compare_scenes(facts, list(zip(facts, rows))))

    rows = [quantiles(seed) for seed in range(6)]
    assert not said([PLAIN] * 6, rows)
    assert 'pixels of 0.3 m and' in said([PLAIN] * 5 + [replace(PLAIN, pixel=0.3)], rows)
    assert '1000 above' in said([PLAIN] * 6, [*rows[:5], quantiles(9, raised)])
    assert 'another unit' in said([PLAIN] * 6, [*rows[:5], quantiles(9, lambda v: v / 1e4)])
    assert not said([PLAIN], [rows[0]])
    # A scene whose sampled squares have no data says nothing.
    assert not said([PLAIN] * 6, [*rows[:5], np.full((4, 8), np.nan)])
    mixture = [FACTS, replace(FACTS, units=NEW, baseline='04.00')]
    (text,) = describe_mixture(mixture)
    assert 'scale or offset' in text and 'offset -0.1 (baseline 04.00) (a.tif)' in text
    with pytest.raises(GeoError, match='offset -0.1 .baseline 04.00., so the same ground'):
        check_one_unit(mixture)
    check_one_unit([convert(facts, 'harmonized')[0] for facts in mixture])
    (text,) = describe_mixture([FACTS, PLAIN, replace(FACTS, path='b.tif', level='L1')])
    assert text == 'images differ in their level: L2 (a.tif), L1 (b.tif)'
