"""Label maps drawn by region, and the gradient of their expected reward. Pure.

The policy of a region is the softmax of the mean logits of its valid pixels. Where a region draws
its most likely class, its pixels keep the labels that the model gives them, so that the map without
any deviation is the one that users see; elsewhere all of its pixels take the drawn class. Rewards
are those of the whole map. With the leave-one-out baseline (Kool, van Hoof, Welling 2019) the
gradient is unbiased for the expected reward.
"""
from __future__ import annotations

from typing import Any

import torch


def region_logits(logits: torch.Tensor, valid: torch.Tensor, region: int) -> torch.Tensor:
    """Return the mean logits of the valid pixels of regions, ``(N, C, h, w)``; 0 without one.

    Args:
        logits: Float ``(N, C, H, W)``.
        valid: Bool ``(N, H, W)``.
        region: Side of a region in pixels; those at the right and lower edge may be smaller.
    """
    weight = valid[:, None].to(logits.dtype)
    count = _region_sums(weight, region)
    return _region_sums(logits * weight, region) / count.clamp(min=1)


def _region_sums(values: torch.Tensor, region: int) -> torch.Tensor:
    rows, columns = values.shape[-2:]
    padded = torch.nn.functional.pad(values, (0, -columns % region, 0, -rows % region))
    images, channels, rows, columns = padded.shape
    return padded.reshape(images, channels, rows // region, region, columns // region,
                          region).sum((3, 5))


def draw(means: torch.Tensor, maps: int) -> torch.Tensor:
    """Return classes of regions drawn from the softmax of their logits, int64 ``(N, G, h, w)``.

    They come from the generator of ``means``' device.

    Args:
        means: Logits of regions, ``(N, C, h, w)``.
        maps: Number of draws, G.
    """
    images, classes, rows, columns = means.shape
    chances = means.softmax(1).permute(0, 2, 3, 1).reshape(-1, classes)
    drawn = torch.multinomial(chances, maps, replacement=True)
    return drawn.reshape(images, rows, columns, maps).permute(0, 3, 1, 2).contiguous()


def label_maps(logits: torch.Tensor, actions: torch.Tensor, valid: torch.Tensor, region: int,
               ignore_index: int = 255) -> torch.Tensor:
    """Return the label maps that draws stand for, int64 ``(N, G, H, W)``.

    Args:
        logits: Float ``(N, C, H, W)``.
        actions: Classes of regions, integers ``(N, G, h, w)``.
        valid: Bool ``(N, H, W)``; other pixels get ``ignore_index``.
        region: Side of a region in pixels.
        ignore_index: Label of pixels without a class.
    """
    likely = region_logits(logits, valid, region).argmax(1)[:, None]
    rows, columns = logits.shape[-2:]

    def spread(each: torch.Tensor) -> torch.Tensor:
        wide = each.repeat_interleave(region, 2).repeat_interleave(region, 3)
        return wide[:, :, :rows, :columns]

    drawn = spread(actions.long())
    maps = torch.where(drawn == spread(likely), logits.argmax(1)[:, None].expand_as(drawn), drawn)
    return maps.masked_fill(~valid[:, None], ignore_index)


def leave_one_out(rewards: torch.Tensor) -> torch.Tensor:
    """Return each reward minus the mean of the others of its group, float64 ``(N, G)``.

    Groups without spread have exact zeros, and so have groups with a reward that is not finite.

    Args:
        rewards: Rewards, ``(N, G)`` with G of 2 or more.
    """
    rewards = rewards.double()
    finite = torch.isfinite(rewards).all(1, keepdim=True)
    rewards = torch.where(finite, rewards, torch.zeros_like(rewards))
    spread = rewards.max(1, keepdim=True)[0] > rewards.min(1, keepdim=True)[0]
    others = (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
    return torch.where(spread, rewards - others, torch.zeros_like(rewards))


def surrogate(logits: torch.Tensor, actions: torch.Tensor, advantages: torch.Tensor,
              valid: torch.Tensor, region: int) -> torch.Tensor:
    """Return for each tile a number whose gradient is that of minus its expected reward, ``(N,)``.

    It is -1/G sum_g A_g sum_regions log pi(drawn class). Its value means nothing.

    Args:
        logits: Float ``(N, C, H, W)``.
        actions: Classes of regions, integers ``(N, G, h, w)``.
        advantages: Advantages A, ``(N, G)``.
        valid: Bool ``(N, H, W)``.
        region: Side of a region in pixels.

    Raises:
        ValueError: If the draws are not those of tiles of this size.
    """
    means = region_logits(logits.float(), valid, region)
    if actions.shape[-2:] != means.shape[-2:]:
        raise ValueError(
            f'{_size(actions)} regions were drawn for tiles that have {_size(means)} now: expected '
            f'training tiles of one size. Set data_preprocessor.size, or crop them.')
    chances = means.log_softmax(1)
    # By comparison instead of gather, whose backward adds in no certain order on some devices.
    classes = torch.arange(chances.shape[1], device=logits.device).view(1, 1, -1, 1, 1)
    chosen = (chances[:, None] * (actions.long()[:, :, None] == classes)).sum(2)
    sums = chosen.flatten(2).sum(2)
    return -(advantages.to(sums.dtype) * sums).mean(1)


def _size(each: Any) -> str:
    return f'{each.shape[-2]}x{each.shape[-1]}'
