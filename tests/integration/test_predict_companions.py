"""A finished map is made again when a file next to its scene changes what the scene says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Tuple

import cv2
import numpy as np
import pytest
import rasterio
from color_model import COLORS, paint, write_scene
from map_runs import read, run
from rasterio.transform import Affine
from support import on_host

from mapsage.maps.errors import PredictError

UTM = dict(crs='EPSG:32633', transform=Affine(0.5, 0, 500000, 0, -0.5, 5000000))
AUX = '<PAMDataset><PAMRasterBand band="{band}">{text}</PAMRasterBand></PAMDataset>'
STATISTICS = '<Metadata><MDI key="STATISTICS_MEAN">1</MDI></Metadata>'

pytestmark = on_host


def test_statistics_of_a_gis_change_nothing_and_no_data_does(
    model: Tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    scene = write_scene(tmp_path / 'a.tif', paint(80, 90), **UTM)
    assert run(model, scene, '--out', tmp_path / 'out') == 0
    aux = tmp_path / 'a.tif.aux.xml'
    aux.write_text(AUX.format(band=1, text=STATISTICS))
    capsys.readouterr()
    assert run(model, scene, '--out', tmp_path / 'out') == 0
    assert 'skipped' in capsys.readouterr().out
    value = COLORS[0].tolist()
    aux.write_text(
        '<PAMDataset>'
        + ''.join(
            f'<PAMRasterBand band="{band}"><NoDataValue>{value[band - 1]}</NoDataValue></PAMRasterBand>'
            for band in (1, 2, 3)
        )
        + '</PAMDataset>'
    )
    with pytest.raises(PredictError, match='was made with another validity'):
        run(model, scene, '--out', tmp_path / 'out')


def test_a_mask_that_was_added_makes_another_map(model: Tuple[Path, Path], tmp_path: Path) -> None:
    scene = write_scene(tmp_path / 'a.tif', paint(80, 90), **UTM)
    assert run(model, scene, '--out', tmp_path / 'out') == 0
    mask = np.full((80, 90), 255, np.uint8)
    mask[:10] = 0
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK='NO'), rasterio.open(scene, 'r+') as file:
        file.write_mask(mask)
    assert (tmp_path / 'a.tif.msk').exists()
    with pytest.raises(PredictError, match='was made with another .*validity'):
        run(model, scene, '--out', tmp_path / 'out')
    assert run(model, scene, '--out', tmp_path / 'out', '--overwrite') == 0
    assert (read(tmp_path / 'out/a.tif')[:10] == 255).all()
    # a mask of the same kind that hides other pixels
    mask[:20] = 0
    with rasterio.open(scene, 'r+') as file:
        file.write_mask(mask)
    with pytest.raises(PredictError, match='was made with another input'):
        run(model, scene, '--out', tmp_path / 'out')


def test_a_world_file_that_was_added_or_changed_makes_another_map(
    model: Tuple[Path, Path], tmp_path: Path
) -> None:
    scene = tmp_path / 'a.png'
    cv2.imwrite(str(scene), COLORS[paint(80, 90)][:, :, ::-1])
    assert run(model, scene, '--out', tmp_path / 'out') == 0
    (tmp_path / 'a.pgw').write_text('0.5\n0\n0\n-0.5\n500000\n5000000\n')
    with pytest.raises(PredictError, match='was made with another .*grid'):
        run(model, scene, '--out', tmp_path / 'out')
    assert run(model, scene, '--out', tmp_path / 'out', '--overwrite') == 0
    (tmp_path / 'a.pgw').write_text('0.5\n0\n0\n-0.5\n600000\n5000000\n')
    with pytest.raises(PredictError, match='was made with another .*grid'):
        run(model, scene, '--out', tmp_path / 'out')
