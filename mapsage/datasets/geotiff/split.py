"""Which pixels of scenes count in training, validation or tests: blocks on the ground.

This module reads the setting ``split`` of `GeoTiffDataset` and logs what it leads to. The division
itself is in `mapsage/geo/blocks.py`. It depends on the ground and the seed only, so the datasets of
training and validation agree without knowing each other.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Dict, List, Mapping, Tuple

from mmengine.dist import get_dist_info
from mmengine.logging import print_log

from mapsage.geo import PARTS, BlockSplit, GeoError, Raster, ScenePart

_KEYS = ('by', 'size', 'unit', 'part', 'share', 'margin', 'seed')


class SceneSplit:
    """One part (``train``, ``val`` or ``test``) of a division of scenes by blocks.

    Args:
        config: Mapping ``split`` of ``GeoTiffDataset``.

    Attributes:
        blocks: The division, which is the same for all three parts.
        part: Name of the part.

    Raises:
        GeoError: If a setting is missing, unknown or out of its range.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.blocks, self.part = _parse(config)
        self._scenes: List[Tuple[Raster, ScenePart]] = []

    def of_scene(self, scene: Raster) -> ScenePart:
        """Return which pixels of a scene belong to the part.

        Raises:
            GeoError: If the blocks are in meters and the scene has no georeference.
        """
        self._scenes.append((scene, self.blocks.of_scene(scene, self.part)))
        return self._scenes[-1][1]

    def check(self) -> None:
        """Log what the part contains in the scenes, and drop the references to the scenes.

        Raises:
            GeoError: If no pixel of the scenes belongs to the part.
        """
        scenes, self._scenes = self._scenes, []
        in_part, total = (sum(scene_part.blocks[i] for _, scene_part in scenes) for i in (0, 1))
        pixels = sum(scene_part.pixels for _, scene_part in scenes)
        area = sum(scene.width * scene.height for scene, _ in scenes)
        size = f'{self.blocks.size:,.10g} {self.blocks.unit}'
        summary = (
            f'split: part {self.part!r} has {in_part} of the {total} blocks of {size} that '
            f'{len(scenes)} scene(s) show'
        )
        if not pixels:
            cause = (
                (
                    f'the margin of {self.blocks.margin:g} {self.blocks.unit} leaves nothing of '
                    f'them; choose a smaller one, or larger blocks'
                )
                if in_part
                else (
                    f'expected at least one. Choose smaller blocks, another seed (now '
                    f'{self.blocks.seed}) or a larger share, the same for all parts'
                )
            )
            raise GeoError(
                f'{summary}, the first scene {scenes[0][0].path} with '
                f'{scenes[0][0].width} x {scenes[0][0].height} pixels: {cause}.'
            )
        if get_dist_info()[0]:
            return
        target = dict(
            val=self.blocks.val, test=self.blocks.test, train=1 - self.blocks.val - self.blocks.test
        )[self.part]
        odd = not 0.5 * target <= in_part / total <= 2 * target
        print_log(
            f'{summary}, {100 * in_part / total:.1f} % ({100 * target:.1f} % asked for); '
            f'{100 * pixels / area:.1f} % of the pixels count in it'
            + '. So few blocks cannot meet the share: choose smaller blocks, or another '
            'seed, for all parts' * odd,
            logger='current',
            level=logging.WARNING if odd else logging.INFO,
        )


def _parse(config: Mapping[str, Any]) -> Tuple[BlockSplit, str]:
    """Return the division and the name of the part that a config describes.

    Raises:
        GeoError: If a setting is missing, unknown or out of its range.
    """

    def refuse(name: str, expected: str) -> GeoError:
        return GeoError(f'split has {name}={config.get(name)!r}, expected {expected}.')

    unknown = sorted(set(config) - set(_KEYS))
    if unknown:
        raise GeoError(f'split has no setting {", ".join(unknown)}; it has {", ".join(_KEYS)}.')
    if config.get('by') != 'blocks':
        raise refuse('by', "'blocks'")
    if not _is_number(config.get('size')) or config['size'] <= 0:
        raise refuse('size', 'the side of a block, more than 0')
    unit = config.get('unit', 'meters')
    if unit not in ('meters', 'pixels'):
        raise refuse('unit', "'meters' or 'pixels'")
    if config.get('part') not in PARTS:
        raise refuse('part', f'one of {PARTS}')
    share = config.get('share', 0.2)
    shares: Dict[str, Any] = dict(share) if isinstance(share, Mapping) else dict(val=share)
    if (
        set(shares) - {'val', 'test'}
        or not shares
        or not all(_is_number(value) and 0 < value < 1 for value in shares.values())
        or sum(shares.values()) >= 1
    ):
        raise refuse(
            'share',
            'the share of validation, more than 0 and less than 1, or '
            'dict(val=0.2, test=0.1) with a sum below 1',
        )
    if config['part'] != 'train' and config['part'] not in shares:
        raise GeoError(
            f'split has part={config["part"]!r} and share={share!r}, which leaves '
            f'nothing for it; expected share=dict(val=0.2, test=0.1), for example, the '
            'same for all parts.'
        )
    margin = config.get('margin', 0)
    if not _is_number(margin) or margin < 0:
        raise refuse('margin', f'a distance in {unit}, at least 0')
    seed = config.get('seed', 0)
    if not isinstance(seed, int) or seed < 0:
        raise refuse('seed', 'an integer, at least 0')
    return BlockSplit(
        float(config['size']),
        unit,
        float(shares.get('val', 0)),
        float(shares.get('test', 0)),
        float(margin),
        seed,
    ), config['part']


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
