"""MMSegmentation's visualization hook, also for samples without an image file.

A window of a large scene exists only as a tensor in the batch. Its picture is made from there, so
the batch must reach the hook before the preprocessor moves it to the device.
"""

from __future__ import annotations

import os
from typing import Any, Optional, Sequence

from mmengine.visualization import Visualizer
from mmseg.engine.hooks import SegVisualizationHook
from mmseg.registry import HOOKS
from mmseg.structures import SegDataSample

from mapsage.distributed.wrappers.rank_batches import Batch
from mapsage.host.batch_images import image_in_batch, shown_channels
from mapsage.host.runner import HostRunner
from mapsage.pictures.tiles import display_rgb, resize


@HOOKS.register_module(name='SegVisualizationHook', force=True)
class WindowVisualizationHook(SegVisualizationHook):
    """``SegVisualizationHook`` that also draws windows of scenes.

    MMSegmentation's hook reads an image from its ``img_path``. A window of a scene has no such
    file; its picture is made from the batch: red, green and blue of ``shown_channels``, stretched
    if they are not 8-bit. Samples with a file are drawn by MMSegmentation's hook.

    Args:
        *args, **kwargs: Arguments of ``SegVisualizationHook``.
    """

    _visualizer: Visualizer
    # MMSegmentation's attribute, which some versions set in the constructor.
    _test_index: int = 0

    def after_val_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Sequence[SegDataSample]] = None,
    ) -> None:
        """Draw the first sample of every ``interval`` iterations of a validation."""
        if not self.draw or not outputs or self._have_files(outputs):
            super().after_val_iter(runner, batch_idx, data_batch, outputs)
        elif (runner.iter + batch_idx) % self.interval == 0:
            self._draw_window(runner, data_batch, 0, outputs[0], 'val', runner.iter + batch_idx)

    def after_test_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Sequence[SegDataSample]] = None,
    ) -> None:
        """Draw the samples of a test."""
        if not self.draw or not outputs or self._have_files(outputs):
            super().after_test_iter(runner, batch_idx, data_batch, outputs)
            return
        for index, output in enumerate(outputs):
            self._test_index += 1
            self._draw_window(runner, data_batch, index, output, 'test', self._test_index)

    def _have_files(self, outputs: Sequence[SegDataSample]) -> bool:
        return bool(self.backend_args) or all(
            '://' in output.img_path or os.path.isfile(output.img_path) for output in outputs
        )

    def _draw_window(
        self,
        runner: HostRunner,
        batch: Any,
        index: int,
        output: SegDataSample,
        split: str,
        step: int,
    ) -> None:
        image = image_in_batch(batch, index, shown_channels(runner.cfg))
        if image is None:
            raise ValueError(
                f'{output.img_path} is no file, and the batch has no (bands, H, W) '
                'inputs to draw it from; load images that can be read from img_path, '
                'or set draw=False of SegVisualizationHook.'
            )
        height, width = output.pred_sem_seg.shape[-2:]
        image = resize(display_rgb(image), height, width, nearest=False)
        self._visualizer.add_datasample(
            f'{split}_{os.path.basename(output.img_path)}',
            image,
            data_sample=output,
            show=self.show,
            wait_time=self.wait_time,
            step=step,
        )
