"""Maps from Python are those of the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from color_model import COLORS, NAMES, paint, write_checkpoint, write_config, write_scene
from labeling_files import UTM

import mapsage
from mapsage.maps.errors import PredictError


def test_a_model_maps_arrays_and_files(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    config, checkpoint = write_config(tmp_path), write_checkpoint(tmp_path)
    model = mapsage.load_model(config, checkpoint, accelerator='cpu', window=64)
    assert model.classes == NAMES and model.palette.shape == (4, 3)
    classes = paint(150, 170)
    scene = write_scene(tmp_path / 'field.tif', classes, **UTM)
    before = sorted(tmp_path.rglob('*'))
    capfd.readouterr()
    # The second and the third prediction need no other loading.
    for image in (scene, str(scene), COLORS[classes]):
        made = model.predict(image)
        np.testing.assert_array_equal(made.classes, classes)
        assert made.confidence.shape == classes.shape and made.confidence.min() > 90
    assert sorted(tmp_path.rglob('*')) == before and capfd.readouterr().out == ''
    small = paint(40, 30)
    np.testing.assert_array_equal(model.predict(COLORS[small]).classes, small)
    with pytest.raises(PredictError, match=r'array of shape \(2,\)'):
        model.predict(np.zeros(2, np.uint8))
    with pytest.raises(TypeError, match='--windows'):
        mapsage.load_model(config, checkpoint, windows='64')


def test_maps_of_scenes_are_written(tmp_path: Path) -> None:
    config, checkpoint = write_config(tmp_path), write_checkpoint(tmp_path)
    classes = paint(90, 110)
    (tmp_path / 'scenes').mkdir()
    for name in 'ab':
        write_scene(tmp_path / f'scenes/{name}.tif', classes, **UTM)
    said: Any = []
    maps = mapsage.predict(
        config,
        checkpoint,
        tmp_path / 'scenes',
        tmp_path / 'out',
        said.append,
        polygons=True,
        accelerator='cpu',
    )
    assert maps == [tmp_path / 'out/a.tif', tmp_path / 'out/b.tif']
    with rasterio.open(maps[1]) as file:
        np.testing.assert_array_equal(file.read(1), classes)
    assert (tmp_path / 'out/b.gpkg').exists()
    assert any('2 input(s), 4 classes' in line for line in said)


def test_a_training_shows_its_report(
    tmp_path: Path, tiny_config: Path, signals_as_before: None
) -> None:
    text = tiny_config.read_text(encoding='utf-8')
    tiny_config.write_text(text.replace('report=None', "report=dict(type='RunReportHook')"))
    short = {'train_cfg.max_iters': 2, 'train_cfg.val_interval': 2}
    run = mapsage.train(tiny_config, tmp_path / 'run', short, accelerator='cpu')
    assert run.config == tmp_path / 'run/tiny.py' and 'max_iters=2' in run.config.read_text()
    assert run.checkpoint.parent == tmp_path / 'run' and run.checkpoint.exists()
    shown = run._repr_html_()
    page = run.report.read_text(encoding='utf-8')
    assert shown.startswith('<iframe srcdoc="&lt;!DOCTYPE html') and '"' in page
    assert shown.count('"') == 4 and '<title>tiny (run)</title>' in page
    with pytest.raises(TypeError, match='--learning-rate'):
        mapsage.train(tiny_config, tmp_path / 'run', learning_rate=1)
