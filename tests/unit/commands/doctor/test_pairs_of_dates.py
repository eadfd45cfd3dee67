"""What the doctor says of pairs of two dates: their shift, and pairs that cannot be trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import cv2
import numpy as np
import pytest
import rasterio
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from support import ROOT

from mapsage.commands.doctor.samples import try_split


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The shipped config over three pairs, of which the second date lies 3 pixels to the right."""
    rng = np.random.default_rng(1)
    for number in range(3):
        ground = cv2.GaussianBlur(rng.integers(0, 255, (80, 80, 3), np.uint8), (0, 0), 1.5)
        label = np.zeros((64, 64), np.uint8)
        label[:8] = 255
        planes = dict(A=ground[8:72, 8:72], B=ground[8:72, 5:69], label=label)
        for name, plane in planes.items():
            (tmp_path / 'train' / name).mkdir(parents=True, exist_ok=True)
            assert cv2.imwrite(str(tmp_path / 'train' / name / f'{number}.png'), plane)
    monkeypatch.setenv('MAPSAGE_CHANGE', str(tmp_path))
    cfg = Config.fromfile(str(ROOT / 'configs' / 'change' / 'siamese_fpn_change.py'))
    cfg.model.backbone.encoder.pop('init_cfg')
    cfg.model.data_preprocessor.size = (64, 64)
    return cfg


def ask(cfg: Any) -> List[str]:
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = MODELS.build(cfg.model)
    return [
        f'{finding.level}: {finding.text}' for finding in try_split(cfg, 'train_dataloader', model)
    ]


def test_a_shift_is_a_note_and_a_step_is_tried(cfg: Any) -> None:
    first, *_, last = ask(cfg)
    assert first.startswith('note: train_dataloader: shift between the dates: 2.9')
    assert 'more than max_shift=1' in first
    assert last == 'ok: train_dataloader: 3 sample(s), one step with the first'


@pytest.mark.parametrize(
    'name, size, text',
    [
        ('label', (64, 64), 'no pixel of the 3 pairs is changed'),
        ('B', (64, 60), '64x64 and 60x64 pixels, expected one size and grid'),
    ],
)
def test_pairs_that_cannot_be_trained_on_are_a_problem(
    cfg: Any, tmp_path: Path, name: str, size: Any, text: str
) -> None:
    for path in (tmp_path / 'train' / name).iterdir():
        cv2.imwrite(
            str(path),
            np.zeros(size, np.uint8) if name == 'label' else np.zeros((*size, 3), np.uint8),
        )
    findings = ask(cfg)
    assert len(findings) == 1 and findings[0].startswith('problem: train_dataloader: ')
    assert text in findings[0]


def place(folder: Path, crs: str = 'EPSG:32631', west: float = 4e5) -> None:
    """Give the pictures of a folder coordinates: PNG files become GeoTIFFs."""
    for path in sorted(folder.iterdir()):
        pixels = np.atleast_3d(cv2.imread(str(path), cv2.IMREAD_UNCHANGED)).transpose(2, 0, 1)
        with rasterio.open(
            str(path.with_suffix('.tif')),
            'w',
            driver='GTiff',
            dtype='uint8',
            count=len(pixels),
            height=64,
            width=64,
            crs=crs,
            transform=rasterio.Affine(0.5, 0, west, 0, -0.5, 5e6),
        ) as file:
            file.write(pixels)
        path.unlink()


@pytest.mark.parametrize(
    'name, grid, text',
    [
        (
            'B',
            dict(crs='EPSG:32632'),
            'have the CRS EPSG:32631 and EPSG:32632, expected one CRS and '
            'grid. Bring the second to the grid of the first: gdalwarp -r bilinear -t_srs',
        ),
        ('B', dict(west=4e5 + 3), 'grids that differ by up to 6.00 pixels, expected one grid'),
        ('label', dict(west=4e5 + 3), 'grids that differ by up to 6.00 pixels, expected one grid'),
    ],
)
def test_pairs_on_different_grids_are_a_problem(
    cfg: Any, tmp_path: Path, name: str, grid: Any, text: str
) -> None:
    for folder in ('A', 'B', 'label'):
        place(tmp_path / 'train' / folder, **(grid if folder == name else {}))
    findings = ask(cfg)
    assert len(findings) == 1 and findings[0].startswith('problem: train_dataloader: ')
    assert text in findings[0]
