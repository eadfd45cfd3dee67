"""Which pixels of scenes count in training, validation or tests: blocks on the ground."""
from __future__ import annotations

import logging
import math
from typing import Any, Dict, List, Mapping, Tuple

from mmengine.dist import get_dist_info
from mmengine.logging import print_log

from mapsage.geo import PARTS, BlockSplit, GeoError, Raster, ScenePart

_KEYS = ('by', 'size', 'unit', 'part', 'share', 'margin', 'seed')


class SceneSplit:
    """One part of a division of scenes by blocks, and what it found in them.

    Args:
        config: Mapping ``split`` of ``GeoTiffDataset``.

    Attributes:
        blocks: The division, which all parts of the data have in common.
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
            GeoError: If blocks in meters have no place in the scene.
        """
        self._scenes.append((scene, self.blocks.of_scene(scene, self.part)))
        return self._scenes[-1][1]

    def check(self) -> None:
        """Say in the log what the part has in the scenes, and forget them.

        Raises:
            GeoError: If it has nothing.
        """
        scenes, self._scenes = self._scenes, []
        own, shown = (sum(part.blocks[i] for _, part in scenes) for i in (0, 1))
        pixels = sum(part.pixels for _, part in scenes)
        area = sum(scene.width * scene.height for scene, _ in scenes)
        size = f'{self.blocks.size:,.10g} {self.blocks.unit}'
        found = (f'split: part {self.part!r} has {own} of the {shown} blocks of {size} that '
                 f'{len(scenes)} scene(s) show')
        if not pixels:
            cause = (f'the margin of {self.blocks.margin:g} {self.blocks.unit} leaves nothing of '
                     f'them; choose a smaller one, or larger blocks') if own else (
                         f'expected at least one. Choose smaller blocks, another seed (now '
                         f'{self.blocks.seed}) or a larger share, the same for all parts')
            raise GeoError(f'{found}, the first scene {scenes[0][0].path} with '
                           f'{scenes[0][0].width} x {scenes[0][0].height} pixels: {cause}.')
        if get_dist_info()[0]:
            return
        asked = dict(val=self.blocks.val, test=self.blocks.test,
                     train=1 - self.blocks.val - self.blocks.test)[self.part]
        odd = not 0.5 * asked <= own / shown <= 2 * asked
        print_log(f'{found}, {100 * own / shown:.1f} % ({100 * asked:.1f} % asked for); '
                  f'{100 * pixels / area:.1f} % of the pixels count in it'
                  + '. So few blocks cannot meet the share: choose smaller blocks, or another '
                    'seed, for all parts' * odd,
                  logger='current', level=logging.WARNING if odd else logging.INFO)


def _parse(config: Mapping[str, Any]) -> Tuple[BlockSplit, str]:
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
    if (set(shares) - {'val', 'test'} or not shares
            or not all(_is_number(each) and 0 < each < 1 for each in shares.values())
            or sum(shares.values()) >= 1):
        raise refuse('share', 'the share of validation, more than 0 and less than 1, or '
                              'dict(val=0.2, test=0.1) with a sum below 1')
    if config['part'] != 'train' and config['part'] not in shares:
        raise GeoError(f'split has part={config["part"]!r} and share={share!r}, which leaves '
                       f'nothing for it; expected share=dict(val=0.2, test=0.1), for example, the '
                       'same for all parts.')
    margin = config.get('margin', 0)
    if not _is_number(margin) or margin < 0:
        raise refuse('margin', f'a distance in {unit}, at least 0')
    seed = config.get('seed', 0)
    if not isinstance(seed, int) or seed < 0:
        raise refuse('seed', 'an integer, at least 0')
    return BlockSplit(float(config['size']), unit, float(shares.get('val', 0)),
                      float(shares.get('test', 0)), float(margin), seed), config['part']


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
