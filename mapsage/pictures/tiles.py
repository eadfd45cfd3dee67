"""Images and label maps as tiles for display. Pure functions on arrays.

Label maps are always resized by selecting pixels (``nearest=True``): averaging would invent labels.

Shapes:
    image      (H, W) or (H, W, B)  any numeric dtype, B bands
    label map  (H, W)               integers
    tile       (H, W, 3)            RGB uint8
    palette    (num_classes, 3)     RGB uint8
"""

from __future__ import annotations

import colorsys
from typing import Optional, Sequence, Tuple

import numpy as np

Color = Tuple[int, int, int]

# Twenty colors that most readers can distinguish, from Sasha Trubetskoy's list of simple distinct
# colors. Black and gray are left out, because the hatch for no data uses them.
_DISTINCT: Tuple[Color, ...] = (
    (230, 25, 75),
    (60, 180, 75),
    (255, 225, 25),
    (0, 130, 200),
    (245, 130, 48),
    (145, 30, 180),
    (70, 240, 240),
    (240, 50, 230),
    (210, 245, 60),
    (250, 190, 212),
    (0, 128, 128),
    (220, 190, 255),
    (170, 110, 40),
    (255, 250, 200),
    (128, 0, 0),
    (170, 255, 195),
    (128, 128, 0),
    (255, 215, 180),
    (0, 0, 117),
    (166, 206, 227),
)
_GOLDEN_RATIO = 0.618033988749895

HATCH_DARK: Color = (58, 58, 58)
HATCH_LIGHT: Color = (118, 118, 118)
# The usual land-cover palettes do not use magenta, while red is building or clutter in most.
WRONG: Color = (222, 0, 140)
# The weight of a class color over an image.
_TINT = 0.4


def default_palette(num_colors: int) -> np.ndarray:
    """Return ``num_colors`` distinct colors, the same ones on every call.

    Args:
        num_colors: Number of colors. From the 21st on, hues advance by the golden ratio, so that
            successive colors differ clearly.

    Returns:
        Colors, RGB uint8 ``(num_colors, 3)``.
    """
    colors = list(_DISTINCT[:num_colors])
    for index in range(len(colors), num_colors):
        saturation, value = ((0.85, 0.95), (0.55, 0.75), (0.9, 0.55))[index % 3]
        red, green, blue = colorsys.hsv_to_rgb(index * _GOLDEN_RATIO % 1.0, saturation, value)
        colors.append((int(red * 255), int(green * 255), int(blue * 255)))
    return np.array(colors, dtype=np.uint8).reshape(-1, 3)


def class_palette(
    num_classes: int, palette: Optional[Sequence[Sequence[int]]] = None
) -> np.ndarray:
    """Return one color per class: the dataset's palette, completed with default colors.

    Args:
        num_classes: Number of classes.
        palette: RGB triples of 0..255 from the dataset's metainfo; None for default colors only.

    Returns:
        Colors, RGB uint8 ``(num_classes, 3)``.

    Raises:
        ValueError: If ``palette`` is not a list of RGB triples of 0..255.
    """
    colors = default_palette(num_classes)
    if palette is None or len(palette) == 0:
        return colors
    values = np.asarray(palette)
    if values.ndim != 2 or values.shape[1] != 3 or values.min() < 0 or values.max() > 255:
        raise ValueError(
            f'the palette in metainfo has shape {values.shape}, expected '
            f'({num_classes}, 3) RGB values of 0..255; correct METAINFO of the '
            'dataset or remove its palette to get a default one'
        )
    count = min(num_classes, len(values))
    colors[:count] = values[:count]
    return colors


def shrink(array: np.ndarray, max_side: int, nearest: bool) -> np.ndarray:
    """Return ``array`` with its longer side at most ``max_side`` pixels.

    Args:
        array: Image or label map, ``(H, W)`` or ``(H, W, B)``.
        max_side: Upper limit of height and width in pixels.
        nearest: Whether to select pixels, for label maps, instead of averaging them.

    Returns:
        The array itself if it is small enough, otherwise a smaller array of the same dtype.
    """
    height, width = array.shape[:2]
    scale = max_side / max(height, width)
    if scale >= 1:
        return array
    return resize(array, max(1, round(height * scale)), max(1, round(width * scale)), nearest)


def resize(array: np.ndarray, height: int, width: int, nearest: bool) -> np.ndarray:
    """Return ``array`` resized to ``(height, width)``.

    With ``nearest=True``, for label maps, pixels are selected: every dtype works, and no new value
    appears. Otherwise pixels are averaged if the array shrinks, and interpolated if not.
    """
    if array.shape[:2] == (height, width):
        return array
    if nearest:
        rows = ((np.arange(height) + 0.5) * array.shape[0] / height).astype(np.intp)
        columns = ((np.arange(width) + 0.5) * array.shape[1] / width).astype(np.intp)
        return array[rows[:, None], columns]
    import cv2

    shrinking = height * width < array.shape[0] * array.shape[1]
    # OpenCV can resize these three dtypes. The rest (int32, float64, bool) is converted to float32.
    direct = array if array.dtype in (np.uint8, np.uint16, np.float32) else array.astype(np.float32)
    resized = cv2.resize(
        np.ascontiguousarray(direct),
        (width, height),
        interpolation=cv2.INTER_AREA if shrinking else cv2.INTER_LINEAR,
    )
    return np.asarray(resized).astype(array.dtype)


def display_rgb(image: np.ndarray) -> np.ndarray:
    """Return any remote-sensing image as uint8 RGB.

    The first three bands become red, green and blue. If there are fewer than three, the first
    becomes gray. uint8 values do not change. Bands of any other dtype are stretched between their
    2nd and 98th percentile, and values that are not finite become black.

    Args:
        image: Image, ``(H, W)`` or ``(H, W, B)`` of any numeric dtype.

    Returns:
        Tile, RGB uint8 ``(H, W, 3)``.

    Raises:
        ValueError: If ``image`` has another number of dimensions or no pixel.
    """
    if image.ndim not in (2, 3) or image.size == 0:
        raise ValueError(
            f'an image of shape {image.shape} cannot be shown, expected (H, W) or '
            '(H, W, bands) with at least one pixel; check the loading transform'
        )
    bands = image[:, :, None] if image.ndim == 2 else image
    bands = bands[:, :, :3] if bands.shape[2] >= 3 else np.repeat(bands[:, :, :1], 3, axis=2)
    if bands.dtype == np.uint8:
        return np.ascontiguousarray(bands)
    return np.stack([_stretch(bands[:, :, index]) for index in range(3)], axis=2)


def _stretch(band: np.ndarray) -> np.ndarray:
    """Map the 2nd to 98th percentile of a band to 0..255; a constant band becomes mid-gray."""
    values = band.astype(np.float64)
    finite = np.isfinite(values)
    if not finite.any():
        return np.zeros(band.shape, dtype=np.uint8)
    low, high = np.percentile(values[finite], (2, 98))
    if high <= low:
        scaled = np.full(band.shape, 127.0)
    else:
        scaled = np.clip((values - low) / (high - low), 0, 1) * 255
    return np.where(finite, scaled, 0).astype(np.uint8)


def color_labels(labels: np.ndarray, palette: np.ndarray) -> np.ndarray:
    """Return a label map in the colors of a palette; labels outside the palette are hatched.

    Args:
        labels: Label map, integers ``(H, W)``. 0..len(palette)-1 are classes; any other label,
            such as the ignore index 255, means no data.
        palette: Colors of the classes, RGB uint8 ``(num_classes, 3)``.

    Returns:
        Tile, RGB uint8 ``(H, W, 3)``.
    """
    labeled = is_class(labels, len(palette))
    tile = hatch(*labels.shape)
    tile[labeled] = palette[labels[labeled].astype(np.intp)]
    return tile


def overlay(image: np.ndarray, labels: np.ndarray, palette: np.ndarray) -> np.ndarray:
    """Return the image tinted in the colors of its labels, with their outlines.

    Args:
        image: Image, RGB uint8 ``(H, W, 3)``.
        labels: Label map, integers ``(H, W)``; pixels that are not a class are hatched.
        palette: Colors of the classes, RGB uint8 ``(num_classes, 3)``.

    Returns:
        Tile, RGB uint8 ``(H, W, 3)``.
    """
    colors = color_labels(labels, palette)
    tile = (image * (1 - _TINT) + colors * _TINT).astype(np.uint8)
    edge = np.zeros(labels.shape, bool)
    edge[:, 1:] = labels[:, 1:] != labels[:, :-1]
    edge[1:] |= labels[1:] != labels[:-1]
    edge &= is_class(labels, len(palette))
    tile[edge] = colors[edge]
    return tile


def disagreement(
    image: np.ndarray, truth: np.ndarray, prediction: np.ndarray, num_classes: int
) -> np.ndarray:
    """Return the image in faint gray with the wrongly predicted pixels in magenta.

    Args:
        image: Image, RGB uint8 ``(H, W, 3)``.
        truth: True labels, ``(H, W)``; pixels that are not a class are hatched.
        prediction: Predicted labels, ``(H, W)``.
        num_classes: Number of classes.

    Returns:
        Tile, RGB uint8 ``(H, W, 3)``.
    """
    gray = image.astype(np.float32).mean(axis=2, keepdims=True)
    # The image is faint and light, so that only magenta stands out.
    tile = np.repeat(150 + gray * 0.4, 3, axis=2).astype(np.uint8)
    labeled = is_class(truth, num_classes)
    tile[labeled & (truth != prediction)] = WRONG
    tile[~labeled] = hatch(*truth.shape)[~labeled]
    return tile


def is_class(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Return whether the labels are classes (and not no data), bool ``(H, W)``."""
    return (labels >= 0) & (labels < num_classes)


def hatch(height: int, width: int, period: int = 12) -> np.ndarray:
    """Return a tile of diagonal stripes, which stand for no data.

    A plain color could be a class: datasets use even black and white.
    """
    diagonal = np.add.outer(np.arange(height), np.arange(width)) % period < period // 2
    return np.where(
        diagonal[:, :, None],
        np.array(HATCH_LIGHT, dtype=np.uint8),
        np.array(HATCH_DARK, dtype=np.uint8),
    )
