"""Score IoU of predictions on CUDA in deterministic mode.

Gap: mmseg's ``IoUMetric`` counts pixels with ``torch.histc``, which PyTorch (1.10 to 2.14) refuses
on CUDA with ``randomness.deterministic=True``, so that a run ends in its first validation.
Remove when: mmseg counts without ``histc``, or PyTorch computes it on CUDA in that mode.
"""

from __future__ import annotations

from typing import Any, Tuple

import torch


def apply() -> None:
    """Make the metric count on the host in deterministic mode.

    The results stay the same: counts are whole numbers, equal on every device.
    """
    from mmseg.evaluation import IoUMetric

    intersect_and_union = IoUMetric.intersect_and_union

    def count(
        pred_label: torch.Tensor, label: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Tuple[torch.Tensor, ...]:
        if torch.are_deterministic_algorithms_enabled():
            pred_label, label = pred_label.cpu(), label.cpu()
        return intersect_and_union(pred_label, label, *args, **kwargs)

    IoUMetric.intersect_and_union = staticmethod(count)
