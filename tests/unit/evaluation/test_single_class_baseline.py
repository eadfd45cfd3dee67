"""The mIoU of a model that predicts the most frequent class everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.registry import DefaultScope
from mmseg.datasets import LoveDADataset
from mmseg.evaluation import IoUMetric
from support import count_class_pixels

from mapsage.evaluation import SingleClassBaseline, single_class_miou
from mapsage.extras.demo import DemoParams, write_demo_data


def test_agrees_with_mmseg_metric(tmp_path: Path) -> None:
    params = DemoParams(train_scenes=1, val_scenes=3, scene_size=128, tile_size=64)
    write_demo_data(tmp_path / 'demo', params)
    pipeline = [dict(type=t) for t in ('LoadImageFromFile', 'LoadAnnotations', 'PackSegInputs')]
    with DefaultScope.overwrite_default_scope('mmseg'):
        dataset = LoveDADataset(
            data_root=str(tmp_path / 'demo'),
            data_prefix=dict(img_path='img_dir/val', seg_map_path='ann_dir/val'),
            pipeline=pipeline,
        )
        labels = [sample['data_samples'].gt_sem_seg.data[0] for sample in dataset]
    counts = count_class_pixels(dataset)
    assert counts.sum() == sum(int((label != 255).sum()) for label in labels)
    areas = [
        IoUMetric.intersect_and_union(torch.full_like(label, int(counts.argmax())), label, 7, 255)
        for label in labels
    ]
    intersection, union = (sum(a[i] for a in areas).numpy() for i in (0, 1))
    present = union > 0
    expected = (intersection[present] / union[present]).mean()
    assert single_class_miou(counts) == pytest.approx(float(expected), rel=1e-6)


def test_absent_classes_do_not_count() -> None:
    assert single_class_miou([60, 20, 20, 0]) == pytest.approx(0.6 / 3)


def test_nothing_labeled_is_an_error() -> None:
    with pytest.raises(ValueError, match='no labeled pixel'):
        single_class_miou(np.zeros(7))


def test_metric_counts_over_samples_and_leaves_ignored_pixels_out() -> None:
    metric = SingleClassBaseline()
    metric.dataset_meta = dict(classes=('field', 'road', 'water'))
    for labels in ([0, 0, 0, 1], [0, 1, 255, 255]):
        metric.process(None, [dict(gt_sem_seg=dict(data=torch.tensor([labels])))])
    # six labeled pixels, four of them field; water does not occur
    assert metric.evaluate(2) == {'single_class_mIoU': round(100 * 4 / 6 / 2, 2)}
