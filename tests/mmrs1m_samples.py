"""Records of MMRS-1M, as its README describes them."""

from __future__ import annotations

from typing import Any, Dict, List


def readme_box(x0: float, y0: float, w: float, h: float, width: int, height: int) -> List[float]:
    """The transformation in the set's README, step by step: pixels to what its JSON holds."""
    if height > width:
        pad_x0 = int((height - width) / 2)
        pad_y0 = 0
        width = height
    else:
        pad_x0 = 0
        pad_y0 = int((width - height) / 2)
        height = width
    x0, y0 = x0 + pad_x0, y0 + pad_y0
    return [x0 / width, y0 / height, (x0 + w) / width, (y0 + h) / height]


def text(*boxes: List[float]) -> str:
    return '[' + ';'.join(','.join(repr(v) for v in box) for box in boxes) + ']'


def record(image: str, *turns: str) -> Dict[str, Any]:
    speakers = ('human', 'gpt') * len(turns)
    return dict(
        image=image,
        conversations=[
            {'from': speaker, 'value': value} for speaker, value in zip(speakers, turns)
        ],
    )
