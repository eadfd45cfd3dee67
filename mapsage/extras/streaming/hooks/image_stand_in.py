"""Black images in place of decoded ones, for a training that needs only the masks.

With cached features, decoding images is wasted work. But a transform may look at an image, for
example to normalize or to crop by content. So some samples are loaded both ways first, and if one
mask differs, all images are decoded as before.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np
import torch
from mmcv.transforms import BaseTransform, LoadImageFromFile
from mmengine.dataset import Compose
from PIL import Image

from mapsage.base.random_state import same_random_numbers
from mapsage.extras.streaming.cache.keys import ViewSeeds
from mapsage.host.batch_images import packed_mask
from mapsage.host.runner import KeyedSamples

# EXIF tag of the orientation, whose value 1 means upright.
_ORIENTATION = 0x0112
# Number of samples that are loaded both ways.
_SAMPLES = 4


class StandIn:
    """Stands in for a ``LoadImageFromFile``: gives a black image of the same size and dtype.

    All other transforms work as before and draw the same random numbers, so the masks stay the
    same. An image whose size cannot be read from its header is decoded.

    Args:
        load: Transform that decodes.
    """

    def __init__(self, load: LoadImageFromFile) -> None:
        self.load = load

    def __call__(self, results: Dict[str, Any]) -> Optional[Dict[str, Any]]:  # noqa: D102
        shape = image_shape(results['img_path'])
        if shape is None:
            return self.load(results)
        results['img'] = np.zeros((*shape, 3), np.float32 if self.load.to_float32 else np.uint8)
        results['img_shape'] = results['ori_shape'] = shape
        return results


def image_shape(path: str) -> Optional[Tuple[int, int]]:
    """Return height and width of a file's image without decoding it; None if they are uncertain."""
    try:
        with Image.open(path) as image:
            # Decoders rotate an image that is not upright.
            if image.getexif().get(_ORIENTATION, 1) != 1:
                return None
            return image.height, image.width
    except Exception:  # the decoder reads the file next and names what is wrong with it
        return None


def leave_images_out(samples: KeyedSamples, seeds: ViewSeeds) -> Optional[Callable[[], None]]:
    """Let a dataset load its samples with black images.

    Some samples are loaded in both ways first. If a mask differs, because a transform looks at the
    image, nothing is changed.

    Args:
        samples: Samples of the training loader.
        seeds: Seeds of the cached views.

    Returns:
        Function that restores the dataset; None if it loads no images that can be left out.
    """
    loads = [
        (transforms, position)
        for transforms in _pipelines(samples)
        for position, transform in enumerate(transforms)
        if _is_plain(transform)
    ]
    indexes = sorted({len(samples) * number // _SAMPLES for number in range(_SAMPLES)})
    if not loads or any(seeds.slot(index) < 0 for index in indexes):
        return None
    with same_random_numbers():
        decoded_masks = [packed_mask(samples.load(index, seeds.of(index, 0))) for index in indexes]

    def restore() -> None:
        for transforms, position in loads:
            transforms[position] = transforms[position].load

    for transforms, position in loads:
        transforms[position] = StandIn(transforms[position])
    try:
        with same_random_numbers():
            equal = all(
                _equal(mask, packed_mask(samples.load(index, seeds.of(index, 0))))
                for index, mask in zip(indexes, decoded_masks)
            )
    except Exception:  # any transform may fail on a black image; then images are decoded
        equal = False
    if not equal:
        restore()
        return None
    return restore


def _pipelines(dataset: Any) -> Iterator[List[Any]]:
    """Yield the transforms of a dataset and of the datasets that it wraps."""
    pipeline = vars(dataset).get('pipeline')
    if isinstance(pipeline, Compose):
        yield pipeline.transforms
    wrapped = vars(dataset).get('dataset')
    for inner in [wrapped] * (wrapped is not None) + list(vars(dataset).get('datasets') or ()):
        yield from _pipelines(inner)


def _is_plain(transform: BaseTransform) -> bool:
    """Return whether an image has the size, three channels and the dtype that its header says."""
    return (
        type(transform) is LoadImageFromFile
        and transform.color_type == 'color'
        and transform.imdecode_backend in ('cv2', 'pillow')
        and not transform.backend_args
        and not transform.file_client_args
    )


def _equal(first: Optional[torch.Tensor], second: Optional[torch.Tensor]) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)
