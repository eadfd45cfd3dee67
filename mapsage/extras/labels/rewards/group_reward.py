"""Sampled label maps, and the policy gradient of their expected reward. Pure functions.

A tile is divided into square regions. The policy draws one class per region, from the softmax of
the mean logits of its valid pixels. If a region draws its most likely class, its pixels keep their
own argmax labels, so a map without any deviation is the map that users see. Otherwise all of its
pixels get the drawn class. The reward scores the whole map; with the leave-one-out baseline (Kool,
van Hoof, Welling 2019) the gradient of the expected reward is unbiased.

Shapes: N tiles, G maps drawn per tile, C classes, H x W pixels, h x w regions.
"""

from __future__ import annotations

import torch


def region_logits(logits: torch.Tensor, valid: torch.Tensor, region: int) -> torch.Tensor:
    """Return each region's mean logits over its valid pixels, ``(N, C, h, w)``; 0 without any.

    Args:
        logits: Float ``(N, C, H, W)``.
        valid: Bool ``(N, H, W)``.
        region: Side of a region in pixels; regions at the right and lower edge may be smaller.
    """
    weight = valid[:, None].to(logits.dtype)
    count = _sum_regions(weight, region)
    return _sum_regions(logits * weight, region) / count.clamp(min=1)


def _sum_regions(values: torch.Tensor, region: int) -> torch.Tensor:
    rows, columns = values.shape[-2:]
    padded = torch.nn.functional.pad(values, (0, -columns % region, 0, -rows % region))
    images, channels, rows, columns = padded.shape
    return padded.reshape(images, channels, rows // region, region, columns // region, region).sum(
        (3, 5)
    )


def draw(means: torch.Tensor, maps: int) -> torch.Tensor:
    """Draw classes of regions from the softmax of their logits, int64 ``(N, G, h, w)``.

    The random numbers come from the generator of the device of ``means``.

    Args:
        means: Logits of regions, from :func:`region_logits`, ``(N, C, h, w)``.
        maps: Number of maps to draw per tile, G.
    """
    images, classes, rows, columns = means.shape
    probabilities = means.softmax(1).permute(0, 2, 3, 1).reshape(-1, classes)
    drawn = torch.multinomial(probabilities, maps, replacement=True)
    return drawn.reshape(images, rows, columns, maps).permute(0, 3, 1, 2).contiguous()


def label_maps(
    logits: torch.Tensor,
    actions: torch.Tensor,
    valid: torch.Tensor,
    region: int,
    ignore_index: int = 255,
) -> torch.Tensor:
    """Return the label maps for drawn region classes, int64 ``(N, G, H, W)``.

    Args:
        logits: Float ``(N, C, H, W)``.
        actions: Drawn classes of regions, integers ``(N, G, h, w)``.
        valid: Bool ``(N, H, W)``; invalid pixels get ``ignore_index``.
        region: Side of a region in pixels.
        ignore_index: Label of invalid pixels.
    """
    likely = region_logits(logits, valid, region).argmax(1)[:, None]
    rows, columns = logits.shape[-2:]

    def to_pixels(regions: torch.Tensor) -> torch.Tensor:
        pixels = regions.repeat_interleave(region, 2).repeat_interleave(region, 3)
        return pixels[:, :, :rows, :columns]

    drawn = to_pixels(actions.long())
    predicted = logits.argmax(1)[:, None].expand_as(drawn)
    maps = torch.where(drawn == to_pixels(likely), predicted, drawn)
    return maps.masked_fill(~valid[:, None], ignore_index)


def leave_one_out(rewards: torch.Tensor) -> torch.Tensor:
    """Return each reward minus the mean of the other rewards of its tile, float64 ``(N, G)``.

    The result is exactly 0 for tiles whose rewards are all equal or include a value that is not
    finite.

    Args:
        rewards: Rewards of the maps, ``(N, G)`` with G of at least 2.
    """
    rewards = rewards.double()
    finite = torch.isfinite(rewards).all(1, keepdim=True)
    rewards = torch.where(finite, rewards, torch.zeros_like(rewards))
    spread = rewards.max(1, keepdim=True)[0] > rewards.min(1, keepdim=True)[0]
    baseline = (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
    return torch.where(spread, rewards - baseline, torch.zeros_like(rewards))


def surrogate(
    logits: torch.Tensor,
    actions: torch.Tensor,
    advantages: torch.Tensor,
    valid: torch.Tensor,
    region: int,
) -> torch.Tensor:
    """Return the policy-gradient surrogate loss of each tile, ``(N,)``.

    ``-1/G sum_g A_g sum_regions log pi(drawn class)``. Its gradient estimates the gradient of the
    negative expected reward; its value has no meaning.

    Args:
        logits: Float ``(N, C, H, W)``.
        actions: Drawn classes of regions, integers ``(N, G, h, w)``.
        advantages: Advantages A of the maps, ``(N, G)``.
        valid: Bool ``(N, H, W)``.
        region: Side of a region in pixels.

    Raises:
        ValueError: If the classes were drawn for tiles of another size.
    """
    means = region_logits(logits.float(), valid, region)
    if actions.shape[-2:] != means.shape[-2:]:
        raise ValueError(
            f'{_size(actions)} regions were drawn for tiles that have {_size(means)} now: expected '
            f'training tiles of one size. Set data_preprocessor.size, or crop them.'
        )
    log_probabilities = means.log_softmax(1)
    # A comparison instead of gather, whose backward adds in an undefined order on some devices.
    classes = torch.arange(means.shape[1], device=logits.device).view(1, 1, -1, 1, 1)
    chosen = (log_probabilities[:, None] * (actions.long()[:, :, None] == classes)).sum(2)
    sums = chosen.flatten(2).sum(2)
    return -(advantages.to(sums.dtype) * sums).mean(1)


def _size(maps: torch.Tensor) -> str:
    return f'{maps.shape[-2]}x{maps.shape[-1]}'
