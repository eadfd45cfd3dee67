"""Compare the size of a mask with the size of its image as soon as both are loaded.

Gap: MMSegmentation's transforms crop, pad and flip an image and its mask without comparing them. A
mask of another size therefore trains the model on shifted labels, or fails later without a file
name, when a batch is stacked.
Remove when: mmseg's ``LoadAnnotations`` compares the sizes.
"""

from __future__ import annotations

from typing import Any, Dict

from mmengine.dataset import Compose

from mapsage.base.errors import UserError


class LabelSizeError(UserError, ValueError):
    """A mask has another size than its image; the message names both files and both sizes."""


def _run_transforms(self: Compose, data: Any) -> Any:
    """Apply the transforms as MMEngine does, and compare sizes when a mask has been loaded.

    Raises:
        LabelSizeError: If the mask has another size than its image.
    """
    # A mask that is there at the beginning was compared when another pipeline loaded it.
    is_due = not _holds_pair(data)
    for transform in self.transforms:
        data = transform(data)
        if data is None:
            return None
        if is_due and _holds_pair(data):
            is_due = False
            _check_size(data)
    return data


def _holds_pair(data: Any) -> bool:
    return isinstance(data, dict) and 'gt_seg_map' in data and 'img' in data


def _check_size(data: Dict[str, Any]) -> None:
    mask, image = data['gt_seg_map'], getattr(data['img'], 'shape', ())[:2]
    # A test pipeline resizes the image and loads the mask in its own size afterwards, which is the
    # size that the image had in its file.
    stored = tuple(data.get('ori_shape') or ())[:2] or image
    # Not for volumes, or images that are no arrays.
    if (getattr(mask, 'ndim', 0), len(image), len(stored)) != (2, 2, 2):
        return
    if tuple(mask.shape) in (image, stored):
        return
    height, width = stored
    name = data.get('seg_map_path')
    raise LabelSizeError(
        f'{f"mask {name}" if name else "its mask"} has {mask.shape[1]}x{mask.shape[0]} pixels and '
        f'image {data.get("img_path")} {width}x{height} (width x height), expected one size. '
        f'Correct the file that is wrong, or export both in the same size.'
    )


def apply() -> None:
    """Replace the method of MMEngine's pipelines."""
    Compose.__call__ = _run_transforms  # type: ignore[method-assign]
