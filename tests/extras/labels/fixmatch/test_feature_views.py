"""What one view lacks, the other has."""

from __future__ import annotations

import torch

from mapsage.extras.labels.fixmatch.feature_views import channel_factors, drop_channels


def test_views_are_complementary_and_half_of_the_pairs_untouched() -> None:
    torch.manual_seed(0)
    one, other = channel_factors(8, 400)
    assert torch.equal(one + other, torch.full((8, 400), 2.0))
    touched = (one != 1).any(1)
    assert int(touched.sum()) == 4
    assert set(one[touched].unique().tolist()) == {0.0, 2.0}
    assert abs(float(one[touched].mean()) - 1) < 0.1


def test_levels_of_equal_width_lose_the_same_channels() -> None:
    torch.manual_seed(0)
    levels = [torch.ones(2, 6, 4, 4), torch.ones(2, 6, 2, 2), torch.ones(2, 5, 2, 2)]
    one, other = drop_channels(levels, levels)
    assert torch.equal(one[0][:, :, 0, 0], one[1][:, :, 0, 0])
    assert [each.shape for each in one] == [each.shape for each in levels]
    for first, second in zip(one, other):
        assert (first + second == 2).all()
