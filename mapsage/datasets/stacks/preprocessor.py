"""Normalization of scene stacks on the device.

Shapes:
    inputs         (N, image_channels, H, W), any dtype: pixels and valid planes; or
                   (N, input_channels, H, W) if days and site are in it already
    after forward  (N, input_channels, H', W') float32
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence

import torch
from mmseg.registry import MODELS

from mapsage.datasets.band_preprocessor import BandDataPreProcessor
from mapsage.geo.stacks import StackLayout, StackLayoutError


@MODELS.register_module()
class StackDataPreProcessor(BandDataPreProcessor):
    """Data preprocessor of scene stacks: normalizes bands, and adds planes of days and site.

    Invalid pixels are 0 after normalization, so that a cloud or a missing date looks like the mean.

    Args:
        sensors: Sensors as in ``SceneStackDataset``; only ``bands`` and ``max_dates`` are read.
        mean: Mean of each band of each sensor, in the units of the files;
            ``tools/geotiff_statistics.py --config CONFIG`` prints mean and standard deviation.
            None: pixels are not normalized, as encoders with built-in normalization need.
        std: Standard deviation of each band of each sensor; None only if ``mean`` is None.
        **kwargs: As in ``SegDataPreProcessor``.

    Raises:
        StackLayoutError: If a sensor lacks values, or ``pad_val`` is not 0.
        ValueError: If only one of ``mean`` and ``std`` is set, or a value of ``std`` is not
            positive.
    """

    _dates: torch.Tensor

    def __init__(
        self,
        sensors: Mapping[str, Mapping[str, Any]],
        mean: Optional[Mapping[str, Sequence[float]]] = None,
        std: Optional[Mapping[str, Sequence[float]]] = None,
        **kwargs: Any,
    ) -> None:
        self.layout = layout = StackLayout.of_config(sensors)
        if kwargs.get('pad_val', 0) != 0:
            raise StackLayoutError(
                f'pad_val={kwargs["pad_val"]}, expected 0: padding is invalid, '
                'and invalid pixels are 0.'
            )
        if (mean is None) != (std is None):
            raise ValueError(f'mean={mean} and std={std}, expected both or none.')
        planes = layout.input_channels - layout.pixel_channels
        statistics: Dict[str, List[float]] = dict(
            mean=[0.0] * layout.input_channels, std=[1.0] * layout.input_channels
        )
        if mean is not None and std is not None:
            statistics = dict(
                mean=layout.per_channel(mean) + [0.0] * planes,
                std=layout.per_channel(std) + [1.0] * planes,
            )
        super().__init__(**statistics, **kwargs)
        # Number of the date that a channel of pixels belongs to.
        dates: List[int] = []
        for sensor in layout.sensors:
            first = dates[-1] + 1 if dates else 0
            dates += [first + date for date in range(sensor.max_dates) for _ in sensor.bands]
        self.register_buffer('_dates', torch.tensor(dates), False)

    def forward(self, data: Dict[str, Any], training: bool = False) -> Dict[str, Any]:
        """Return a batch for the model: ``inputs`` (N, input_channels, H, W), ``data_samples``.

        Raises:
            StackLayoutError: If an image has another number of channels, images differ in size, or
                a sample has no ``days``.
        """
        channels = {int(image.shape[0]) for image in data['inputs']}
        layout = self.layout
        if channels not in ({layout.image_channels}, {layout.input_channels}):
            raise StackLayoutError(
                f'images with {sorted(channels)} channels, expected {layout.image_channels} for '
                f'{layout}. Dataset and data_preprocessor need the same sensors.'
            )
        batch = super().forward(data, training)
        images: torch.Tensor = batch['inputs']
        pixels, planes = images[:, : layout.pixel_channels], images[:, layout.pixel_channels :]
        valid = planes[:, : layout.dates]
        # In place: the batch is a new tensor.
        pixels.mul_(valid.index_select(1, self._dates))
        if channels == {layout.image_channels}:
            batch['inputs'] = layout.add_planes(
                images, *self._facts(batch['data_samples'], images.device)
            )
        return batch

    def _facts(self, samples: Optional[Sequence[Any]], device: torch.device) -> List[torch.Tensor]:
        """Return day numbers (N, dates) and sites (N, 2) of samples."""
        metas = [sample.metainfo for sample in samples or ()]
        if not metas or any('days' not in meta for meta in metas):
            raise StackLayoutError(
                'the samples have no days; end the pipelines with '
                'PackStackInputs, which hands them to the model.'
            )
        unknown = float('nan'), float('nan')
        facts = [
            [list(meta['days']) for meta in metas],
            [list(meta.get('site', unknown)) for meta in metas],
        ]
        return [torch.tensor(rows, dtype=torch.float32).to(device) for rows in facts]

    def _normalize(self, images: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        height, width = images.shape[2:]
        if (height, width) == tuple(shape):
            # Normalized in place below. That is safe, because `_stack` made a new tensor.
            batch = inside = images.float()
        else:
            batch = images.new_zeros((*images.shape[:2], *shape), dtype=torch.float32)
            inside = batch[:, :, :height, :width]
            inside.copy_(images)
        channels = images.shape[1]
        inside.sub_(self.mean[:channels]).div_(self.std[:channels])
        return batch

    def _stack(self, images: object) -> Optional[torch.Tensor]:
        if not isinstance(images, (list, tuple, torch.Tensor)):
            return None
        shapes = {tuple(image.shape) for image in images}
        if len(shapes) != 1:
            raise StackLayoutError(
                f'images of the shapes {sorted(shapes)} in one batch, expected '
                'one: crop or resize them, or set batch_size=1.'
            )
        return torch.stack(tuple(images))
