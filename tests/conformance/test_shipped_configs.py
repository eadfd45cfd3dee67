"""Twenty of the configs that MMSegmentation ships, shrunk, end alike under both Runners.

``sweep_configs.py`` tries all of them; docs/reference/conformance.md has its result.
"""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import pytest
from shipped_configs import (
    Compared,
    compare_shipped,
    listed_reasons,
    reason_of,
    shipped_configs,
    write_shipped_images,
)
from support import main_leg

# Small models of different families, heads, losses, optimizers and schedules.
SAMPLE = (
    'bisenetv1/bisenetv1_r18-d32_4xb4-160k_cityscapes-1024x1024.py',
    'bisenetv2/bisenetv2_fcn_4xb4-160k_cityscapes-1024x1024.py',
    'cgnet/cgnet_fcn_4xb4-60k_cityscapes-680x680.py',
    'ddrnet/ddrnet_23-slim_in1k-pre_2xb6-120k_cityscapes-1024x1024.py',
    'deeplabv3plus/deeplabv3plus_r18b-d8_4xb2-80k_cityscapes-512x1024.py',
    'erfnet/erfnet_fcn_4xb4-160k_cityscapes-512x1024.py',
    'fastscnn/fast_scnn_8xb4-160k_cityscapes-512x1024.py',
    'hrnet/fcn_hr18s_4xb2-40k_cityscapes-512x1024.py',
    'mobilenet_v2/mobilenet-v2-d8_fcn_4xb4-160k_ade20k-512x512.py',
    'ocrnet/ocrnet_hr18s_4xb2-40k_cityscapes-512x1024.py',
    'pidnet/pidnet-s_2xb6-120k_1024x1024-cityscapes.py',
    'point_rend/pointrend_r50_4xb2-80k_cityscapes-512x1024.py',
    'pspnet/pspnet_r18b-d8_4xb2-80k_cityscapes-512x1024.py',
    'segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py',
    'segmenter/segmenter_vit-t_mask_8xb1-160k_ade20k-512x512.py',
    'segnext/segnext_mscan-t_1xb16-adamw-160k_ade20k-512x512.py',
    'sem_fpn/fpn_r50_4xb2-80k_cityscapes-512x1024.py',
    'stdc/stdc1_4xb12-80k_cityscapes-512x1024.py',
    'twins/twins_svt-s_fpn_fpnhead_8xb4-80k_ade20k-512x512.py',
    'unet/unet-s5-d16_fcn_4xb4-40k_stare-128x128.py',
)
MOST_REASONS = 8  # may only become smaller


@pytest.fixture(scope='module')
def data(tmp_path_factory: Any) -> Path:
    return write_shipped_images(tmp_path_factory.mktemp('shipped') / 'data')


@main_leg
@pytest.mark.parametrize(
    'name',
    [
        *SAMPLE[::3],
        *(pytest.param(name, marks=pytest.mark.long) for name in SAMPLE if name not in SAMPLE[::3]),
    ],
)
def test_a_shipped_config_ends_alike(name: str, data: Path, tmp_path: Path) -> None:
    assert compare_shipped(name, data, tmp_path) == Compared('equal')


@main_leg
def test_the_list_of_reasons_only_shrinks() -> None:
    names, reasons = shipped_configs(), listed_reasons()
    assert len(reasons) <= MOST_REASONS
    assert [pattern for pattern in reasons if not fnmatch.filter(names, pattern)] == []
    assert [name for name in SAMPLE if name not in names or reason_of(name)] == []
