"""Seeds derived from integers."""

from __future__ import annotations

from mapsage.accelerator import derived_seed


def test_seeds_repeat_are_in_range_and_depend_on_each_number_and_its_place() -> None:
    seeds = [derived_seed(*numbers) for numbers in ((1, 2, 3), (1, 2, 4), (1, 3, 2), (0, 2, 3))]
    assert derived_seed(1, 2, 3) == seeds[0] and len(set(seeds)) == 4
    assert all(0 <= seed < 2**32 for seed in seeds)
