"""Black images in place of decoded ones, for a training that needs the masks alone."""
from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np
import torch
from mmcv.transforms import LoadImageFromFile
from PIL import Image

from mapsage.features.cache.keys import ViewSeeds
from mapsage.random_state import same_random_numbers

_ORIENTATION = 0x0112  # tag of EXIF; 1 is upright
_SAMPLES = 4  # that are loaded in both ways, to see whether their masks are equal


class StandIn:
    """Takes the place of a ``LoadImageFromFile``: gives a black image of the same size and dtype.

    All other transforms work as before and draw the same random numbers, so that the masks stay
    what they were. An image whose size cannot be read from its header is decoded.

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
    """Return height and width of a file's image without decoding it; None if they are not certain.
    """
    try:
        with Image.open(path) as image:
            if image.getexif().get(_ORIENTATION, 1) != 1:
                return None  # decoders turn it
            return image.height, image.width
    except Exception:  # whatever is wrong with it, the decoder says it better
        return None


def leave_images_out(samples: Any, seeds: ViewSeeds) -> Optional[Callable[[], None]]:
    """Let a dataset load its samples with black images.

    Some samples are loaded in both ways first. If a mask differs, because a transform looks at the
    image, nothing is changed.

    Args:
        samples: ``KeyedLoader.samples`` of the training loader.
        seeds: Seeds of the cached views.

    Returns:
        Function that restores the dataset; None if it loads no images that can be left out.
    """
    places = [(transforms, at) for transforms in _pipelines(samples)
              for at, each in enumerate(transforms) if _is_plain(each)]
    indexes = sorted({len(samples) * part // _SAMPLES for part in range(_SAMPLES)})
    if not places or any(seeds.slot(index) < 0 for index in indexes):
        return None
    with same_random_numbers():
        decoded = [_mask(samples.load(index, seeds.of(index, 0))) for index in indexes]

    def restore() -> None:
        for transforms, at in places:
            transforms[at] = transforms[at].load

    for transforms, at in places:
        transforms[at] = StandIn(transforms[at])
    try:
        with same_random_numbers():
            equal = all(_equal(mask, _mask(samples.load(index, seeds.of(index, 0))))
                        for index, mask in zip(indexes, decoded))
    except Exception:  # a transform that cannot work on a black image
        equal = False
    if not equal:
        restore()
        return None
    return restore


def _pipelines(dataset: Any) -> Iterator[List[Any]]:
    """Yield the transforms of a dataset and of the datasets that it wraps."""
    transforms = getattr(vars(dataset).get('pipeline'), 'transforms', None)
    if isinstance(transforms, list):
        yield transforms
    inner = vars(dataset).get('dataset')
    for each in [inner] * (inner is not None) + list(vars(dataset).get('datasets') or ()):
        yield from _pipelines(each)


def _is_plain(transform: Any) -> bool:
    """Return whether an image has the size, three channels and the dtype that its header says."""
    return (type(transform) is LoadImageFromFile and transform.color_type == 'color'
            and transform.imdecode_backend in ('cv2', 'pillow')
            and not transform.backend_args and not getattr(transform, 'file_client_args', None))


def _mask(sample: Any) -> Optional[torch.Tensor]:
    return getattr(getattr(sample['data_samples'], 'gt_sem_seg', None), 'data', None)


def _equal(one: Optional[torch.Tensor], other: Optional[torch.Tensor]) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
