"""Passports in checkpoints and exported files, and scenes at the door of the programs that read them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Tuple

import numpy as np
import pytest
import rasterio
import torch
from color_model import COLORS, write_checkpoint, write_config
from map_runs import read, run
from rasterio.enums import ColorInterp

from mapsage.commands import passport as command
from mapsage.geo import GeoError, facts_of, open_scene
from mapsage.geo.passport import VERSION, describe_part
from mapsage.geo.scene_facts import sample_quantiles
from mapsage.maps.errors import PredictError

RGB = (ColorInterp.red, ColorInterp.green, ColorInterp.blue)
CLASSES = np.random.RandomState(0).randint(0, 4, (8, 8)).repeat(16, 0).repeat(16, 1)


def paint(classes: np.ndarray) -> np.ndarray:
    """Return the colors of classes, (3, height, width)."""
    return COLORS[classes].transpose(2, 0, 1)


def write(
    path: Path, values: np.ndarray, pixel: float = 2, colors: Any = RGB, names: Any = ()
) -> Path:
    with rasterio.open(
        path, 'w', driver='GTiff', count=len(values), height=128, width=128, dtype=values.dtype,
        crs='EPSG:32633', transform=rasterio.Affine(pixel, 0, 5e5, 0, -pixel, 5e6),
    ) as file:  # fmt: skip
        file.write(values)
        file.colorinterp = colors
        if names:
            file.descriptions = names
    return path


@pytest.fixture
def trained(tmp_path: Path) -> Tuple[Path, Path]:
    """The config and the checkpoint of the model of four colors, with the passport of a scene."""
    scene = open_scene(write(tmp_path / 'trained.tif', paint(CLASSES)))
    part = describe_part([facts_of(scene)], [sample_quantiles(scene)])
    checkpoint = write_checkpoint(tmp_path)
    content = torch.load(checkpoint, map_location='cpu')
    passport = dict(version=VERSION, parts={'': part}, classes={})
    content.setdefault('meta', {})['data'] = dict(passport=passport)
    torch.save(content, checkpoint)
    return write_config(tmp_path), checkpoint


def test_the_command_prints_it(trained: Tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    assert command.main([str(trained[1])]) == 0
    text = capsys.readouterr().out
    assert json.loads(text)['parts']['']['bands'] == ['red', 'green', 'blue']
    assert str(tmp_path) not in text
    bare = tmp_path / 'bare'
    bare.mkdir()
    assert command.main([str(write_checkpoint(bare))]) == 1
    assert 'has no passport' in capsys.readouterr().out
    with pytest.raises(PredictError, match='cannot be read'):
        command.main([str(tmp_path / 'missing.pth')])


def test_bands_in_another_order_make_the_same_map(
    trained: Tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    values = paint(CLASSES)
    scene = write(tmp_path / 'scene.tif', values[::-1], colors=RGB[::-1])
    assert run(trained, scene, '--out', tmp_path / 'out') == 0
    np.testing.assert_array_equal(read(tmp_path / 'out/scene.tif'), CLASSES)
    said = capsys.readouterr().out
    assert 'bands are read in the order red, green, blue' in said and 'warning' not in said
    # Numbers of the command line count as they are.
    assert (
        run(trained, scene, '--out', tmp_path / 'numbers', '--bands', 3, 2, 1, '--trust-scenes')
        == 0
    )
    np.testing.assert_array_equal(read(tmp_path / 'numbers/scene.tif'), CLASSES)
    # The map of files in the training's order is another map.
    write(tmp_path / 'scene.tif', values)
    with pytest.raises(PredictError, match='was made with another bands'):
        run(trained, scene, '--out', tmp_path / 'out')


def test_a_missing_band(trained: Tuple[Path, Path], tmp_path: Path) -> None:
    names = ('red', 'green', 'nir')
    scene = write(tmp_path / 'scene.tif', paint(CLASSES), names=names)
    with pytest.raises(PredictError, match='no band blue.*red, green, nir'):
        run(trained, scene, '--out', tmp_path / 'out', '--trust-scenes')


def test_pixels_of_another_size(trained: Tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    scene = write(tmp_path / 'scene.tif', paint(CLASSES), pixel=1)
    with pytest.raises(PredictError, match=r'pixels of 1 m, and training had 2 m.*--gsd auto'):
        run(trained, scene, '--out', tmp_path / 'out')
    assert run(trained, scene, '--out', tmp_path / 'out', '--gsd', 'auto') == 0
    assert '64x64 pixels (--gsd 2' in capsys.readouterr().out
    assert run(trained, scene, '--out', tmp_path / 'own', '--trust-scenes') == 0
    assert 'warning' not in capsys.readouterr().out
    assert run(trained, scene, '--out', tmp_path / 'scale', '--scale', 1.5) == 0


def test_values_of_another_unit(trained: Tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    dark = write(tmp_path / 'dark.tif', (paint(CLASSES) // 12).astype('uint8'))
    assert run(trained, dark, '--out', tmp_path / 'dark') == 0
    assert 'another unit' in capsys.readouterr().out
    black = write(tmp_path / 'black.tif', paint(CLASSES) * 0)
    assert run(trained, black, '--out', tmp_path / 'black') == 0


def test_a_model_without_a_passport(tmp_path: Path, capsys: Any) -> None:
    model = write_config(tmp_path), write_checkpoint(tmp_path)
    scene = write(tmp_path / 'scene.tif', paint(CLASSES), pixel=99)
    assert run(model, scene, '--out', tmp_path / 'out') == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if 'passport' in line]
    assert 'has no passport' in line
    with pytest.raises(PredictError, match='--gsd auto'):
        run(model, scene, '--out', tmp_path / 'auto', '--gsd', 'auto')


def test_mosaics_of_two_units(trained: Tuple[Path, Path], tmp_path: Path) -> None:
    paths = [write(tmp_path / f'{name}.tif', paint(CLASSES)) for name in 'ab']
    for path, offset in zip(paths, (0, -0.1)):
        with rasterio.open(path, 'r+') as file:
            file.scales, file.offsets = (1e-4,) * 3, (offset,) * 3
    with pytest.raises((GeoError, PredictError), match="units='harmonized'"):
        run(trained, *paths, '--out', tmp_path / 'out', '--mosaic', 'city')


def test_suggestions_and_embeddings(trained: Tuple[Path, Path], tmp_path: Path) -> None:
    from mapsage.extras.embeddings import embed
    from mapsage.extras.labels import suggest_labels

    scene = write(tmp_path / 'scene.tif', paint(CLASSES), pixel=1)
    common = [*map(str, trained), str(scene), '--accelerator', 'cpu']
    with pytest.raises(PredictError, match='--gsd auto'):
        suggest_labels.main([*common, '--out', str(tmp_path / 'next.gpkg')])
    with pytest.raises(PredictError, match='--gsd auto'):
        embed.main([*common, '--out', str(tmp_path / 'vectors')])


def test_options_of_all_programs_are_the_same() -> None:
    from mapsage.commands import options

    parser = argparse.ArgumentParser()
    options.add_scene_options(parser)
    args = parser.parse_args(['--units', 'reflectance', '--trust-scenes'])
    assert (args.units, args.trust_scenes) == ('reflectance', True)
    assert options.pixel_size('auto') == 'auto' and options.pixel_size('0.5') == 0.5
