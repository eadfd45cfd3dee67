"""Published feature values of the official DINOv3 weights, and a comparison with them.

``tools/check_weights.py`` uses this to tell whether downloaded weights compute what their authors
published. The test image is not part of the repository; the caller passes its pixels.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from .dinov3 import PATCH_SIZE, DINOv3ViT
from .dinov3_weights import NORMALIZATION, WeightsError

# Two cats, 640 x 480 pixels (W x H).
IMAGE = 'http://images.cocodataset.org/val2017/000000039769.jpg'
IMAGE_SIZE = (480, 640)
# Both sides are resized to this many pixels, ignoring the aspect ratio.
_SIDE = 224
# The source allows 1e-4, but it also shares the image decoder and the resizing.
TOLERANCE = 1e-3


class ReferenceFeatures(NamedTuple):
    """First five channels of the class token and of the top-left patch, after the final norm."""

    class_token: Sequence[float]
    patch: Optional[Sequence[float]]


# Source: transformers, src/transformers/models/dinov3_vit/convert_dinov3_vit_to_hf.py. Values for
# the web weights are from a77460f and earlier; the satellite class token is from a later version.
PUBLISHED: Dict[str, ReferenceFeatures] = {
    'small web': ReferenceFeatures(
        (0.463562, -0.415609, 0.408237, -0.126613, -0.286637),
        (-0.038754, -0.250895, -0.016393, -0.455474, 0.571582),
    ),
    'small+ web': ReferenceFeatures(
        (-0.471349, -1.365779, -0.317983, 0.377219, -0.769086),
        (0.144552, -0.388117, -0.393434, -0.157695, -0.600380),
    ),
    'base web': ReferenceFeatures(
        (1.034643, -0.180609, -0.341018, -0.066377, -0.011384),
        (-0.082524, -0.456273, -0.728030, -0.430680, -0.152880),
    ),
    'large web': ReferenceFeatures(
        (0.484527, -0.582215, 0.480636, 0.592040, 0.945166),
        (-0.211367, -0.490864, -0.257131, 0.101764, 0.154511),
    ),
    'huge+ web': ReferenceFeatures(
        (-0.064576, -0.148867, -0.621524, 0.634879, 0.152696),
        (-0.093817, 0.287407, -0.050037, 0.428043, 0.094562),
    ),
    '7B web': ReferenceFeatures(
        (0.275440, -0.261354, 0.067772, 0.049936, -0.158747),
        (0.044442, -0.052542, 0.070777, -0.065112, -0.026547),
    ),
    'large sat493m': ReferenceFeatures((-0.33235, 0.34052, -0.22087, 0.21434, 0.09003), None),
}


class Comparison(NamedTuple):
    """Difference between a model's features and the published ones.

    Attributes:
        normalization: Name of the mean and std that normalized the image.
        difference: Largest absolute difference.
        computed: Features that the model computed.
    """

    normalization: str
    difference: float
    computed: ReferenceFeatures


def compare(model: DINOv3ViT, name: str, image: np.ndarray) -> List[Comparison]:
    """Compare a model's features with the published ones.

    Args:
        model: Model with all its blocks and the final norm.
        name: Key of :data:`PUBLISHED`.
        image: Pixels of the image :data:`IMAGE`, RGB, uint8 (480, 640, 3).

    Returns:
        One comparison per normalization, smallest difference first. It is not documented which
        normalization the published values of the satellite model were computed with.

    Raises:
        WeightsError: If the image has another size, or this torch cannot resize as the source does.
    """
    if image.shape[:2] != IMAGE_SIZE:
        raise WeightsError(
            f'an image of {image.shape[:2]} pixels (H x W), expected {IMAGE}, which '
            f'has {IMAGE_SIZE}'
        )
    if tuple(map(int, torch.__version__.split('.')[:2])) < (1, 11):
        raise WeightsError(
            f'torch {torch.__version__} resizes without antialiasing, expected 1.11 '
            'or newer; compare in another environment'
        )
    pixels = torch.from_numpy(image.copy()).permute(2, 0, 1)[None].float()
    resized = F.interpolate(pixels, (_SIDE, _SIDE), mode='bilinear', antialias=True)
    kinds = [name.split()[1], *(kind for kind in NORMALIZATION if kind != name.split()[1])]
    comparisons = [_compare_normalized(model, PUBLISHED[name], resized, kind) for kind in kinds]
    return sorted(comparisons, key=lambda comparison: comparison.difference)


def _compare_normalized(
    model: DINOv3ViT, published: ReferenceFeatures, x: torch.Tensor, kind: str
) -> Comparison:
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in NORMALIZATION[kind])
    tokens: List[torch.Tensor] = []
    handle = model.norm.register_forward_hook(lambda _, __, output: tokens.append(output))
    normalization, model.normalization = model.normalization, None
    try:
        with torch.no_grad():
            model.eval()((x - mean) / std)
    finally:
        handle.remove()
        model.normalization = normalization
    patches = (_SIDE // PATCH_SIZE) ** 2
    computed = ReferenceFeatures(
        tokens[-1][0, 0, :5].tolist(), tokens[-1][0, -patches, :5].tolist()
    )
    pairs = [
        pair
        for values, expected in zip(computed, published)
        if expected is not None
        for pair in zip(values or (), expected)
    ]
    difference = max(abs(value - expected) for value, expected in pairs)
    return Comparison(kind, difference, computed)
