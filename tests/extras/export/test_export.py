"""tools/export.py from a checkpoint to a file, and tools/predict.py --model from it to a map."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Tuple

import cv2
import numpy as np
import pytest
import rasterio
import torch
from color_model import COLORS, NAMES, paint, write_checkpoint, write_config, write_scene
from map_runs import WITHOUT_HOSTS, read
from map_runs import command as predict
from map_runs import run as run_checkpoint
from mmengine.model import BaseModule
from mmseg.registry import MODELS
from rasterio.transform import Affine
from support import ROOT

onnx = pytest.importorskip('onnx')
pytest.importorskip('onnxruntime')

from mapsage.commands import passport as print_passport  # noqa: E402
from mapsage.commands.predict import (  # noqa: E402
    PARTIAL,
    map_options,
    open_model,
    run_prediction,
)
from mapsage.extras.export import export as command  # noqa: E402
from mapsage.extras.export.errors import ExportError  # noqa: E402
from mapsage.extras.export.graph import most_opset  # noqa: E402
from mapsage.extras.export.proof import Proof  # noqa: E402
from mapsage.extras.export.quantize import is_close  # noqa: E402
from mapsage.geo import facts_of, open_scene  # noqa: E402
from mapsage.geo.passport import VERSION, describe_part  # noqa: E402
from mapsage.geo.scene_facts import sample_quantiles  # noqa: E402
from mapsage.maps.errors import PredictError  # noqa: E402
from mapsage.maps.exported import ExportedModel  # noqa: E402
from mapsage.maps.prediction import Prediction  # noqa: E402

UTM = dict(crs='EPSG:32633', transform=Affine(0.5, 0, 500000, 0, -0.5, 5000000))
DATA = """
val_dataloader = dict(dataset=dict(
    test_dataloader['dataset'], data_root='{root}', img_suffix='.tif', seg_map_suffix='.png',
    data_prefix=dict(img_path='img', seg_map_path='ann')))
"""


@MODELS.register_module()
class Undecided(BaseModule):
    """Takes a decision on the values of the image, which a trace cannot follow."""

    def forward(self, image: torch.Tensor) -> Tuple[torch.Tensor]:
        return (image if image.mean() > 0.4 else 1 - image,)


def write_tiles(folder: Path) -> str:
    """Write three tiles with labels, whose pixels are half a meter wide; return lines of config."""
    (folder / 'img').mkdir(parents=True)
    (folder / 'ann').mkdir()
    for number in range(3):
        classes = np.roll(paint(80, 90), 17 * number, axis=1)
        write_scene(folder / 'img' / f'{number}.tif', classes, **UTM)
        cv2.imwrite(str(folder / 'ann' / f'{number}.png'), classes)
    return DATA.format(root=folder)


@pytest.fixture(scope='module')
def model(tmp_path_factory) -> Tuple[Path, Path]:
    folder = tmp_path_factory.mktemp('model')
    return write_config(folder, write_tiles(folder / 'data')), write_checkpoint(folder)


@pytest.fixture(scope='module')
def exported(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp('exported') / 'color.onnx'
    assert export(model, path) == 0
    return path


def export(model: Tuple[Path, Path], out: Path, *arguments: Any) -> int:
    return command.main(
        [*map(str, model), '--out', str(out), '--accelerator', 'cpu', *map(str, arguments)]
    )


def run(exported: Path, *arguments: Any) -> int:
    return predict.main(['--model', str(exported), *map(str, arguments)])


def test_a_file_has_the_passport_of_its_checkpoint(model, tmp_path, capsys) -> None:
    scene = tmp_path / 'trained.tif'
    write_scene(scene, paint(80, 90), **UTM)
    raster = open_scene(scene)
    images = describe_part([facts_of(raster)], [sample_quantiles(raster)])
    checkpoint = torch.load(model[1], map_location='cpu')
    passport = dict(version=VERSION, parts={'': images}, classes={})
    checkpoint.setdefault('meta', {})['data'] = dict(passport=passport)
    torch.save(checkpoint, tmp_path / 'trained.pth')
    file = tmp_path / 'color.onnx'
    assert export((model[0], tmp_path / 'trained.pth'), file) == 0
    capsys.readouterr()
    assert print_passport.main([str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(passport))
    assert run(file, scene, '--out', tmp_path / 'own') == 0
    write_scene(scene, paint(80, 90), **dict(UTM, transform=UTM['transform'] * Affine.scale(3)))
    with pytest.raises(PredictError, match=r'pixels of 1.5 m, and training had 0.5 m'):
        run(file, scene, '--out', tmp_path / 'maps')


def test_a_file_proves_itself_and_says_what_it_is(model, tmp_path, capsys) -> None:
    out = tmp_path / 'new' / 'color.onnx'
    export(model, out)
    said = capsys.readouterr().out
    assert '16 tiles of the val set' in said and 'equal pixels 100.0000 %' in said
    assert 'mIoU 100.00 (PyTorch) and 100.00 (ONNX Runtime)' in said
    assert sorted(path.name for path in out.parent.iterdir()) == [
        'color.onnx',
        'color.onnx.json',
        'color.stac.json',
    ]
    keys = {each.key: json.loads(each.value) for each in onnx.load(out).metadata_props}
    description = keys.pop('mapsage')
    assert keys == dict(
        model_type='Segmentor',
        tile_size=64,
        tiles_overlap=25,
        seg_thresh=0,
        seg_small_segment=0,
        resolution=50,
        class_names=dict(zip('0123', NAMES)),
    )
    assert description['window'] == 64 and description['bands']['like_opencv']
    sidecar = json.loads((out.parent / 'color.onnx.json').read_text())
    assert (sidecar['task'], sidecar['input_height'], sidecar['id2label']['2']) == (
        'semantic-segmentation',
        64,
        'blue',
    )
    item = json.loads((out.parent / 'color.stac.json').read_text())
    assert item['properties']['mlm:input'][0]['input']['shape'] == [-1, 3, 64, 64]
    assert item['assets']['model']['href'] == './color.onnx'
    assert [each['name'] for each in item['properties']['bands']] == ['red', 'green', 'blue']
    with pytest.raises(ExportError, match='exists already.*--overwrite'):
        export(model, out)
    assert export(model, out, '--overwrite', '--gsd', '2', '--window', '48') == 0
    keys = {each.key: json.loads(each.value) for each in onnx.load(out).metadata_props}
    assert keys['resolution'] == 200 and keys['tile_size'] == 48


def test_a_file_that_differs_is_not_written(model, tmp_path) -> None:
    config = tmp_path / 'undecided.py'
    config.write_text(model[0].read_text() + "model['backbone']['type'] = 'Undecided'\n")
    out = tmp_path / 'color.onnx'
    out.write_bytes(b'the file before')
    # PyTorch before 1.13 may not write the layers that are looked at.
    layer = r'.* first .* is backbone \(Undecided\)' if most_opset() >= 17 else ''
    with pytest.raises(ExportError, match=f'not written{layer}'):
        export((config, model[1]), out, '--overwrite')
    assert out.read_bytes() == b'the file before' and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['--target', 'gcu', '--opset', '17'], '--opset 17 with --target gcu: expected 13 to 15'),
        (['--batch', '0'], '--batch 0: expected 1 or more'),
        (
            ['--cfg-options', 'val_dataloader.dataset.data_root=nowhere'],
            'cannot be read.*data_root',
        ),
        (['--cfg-options', 'crop_size=(64,32)'], '32x64 pixels .crop_size.* squares'),
    ],
)
def test_what_cannot_be_exported_is_an_error(model, tmp_path, arguments, message) -> None:
    with pytest.raises(ExportError, match=message):
        export(model, tmp_path / 'color.onnx', *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('place', ['{file}/color.onnx', '/proc/color.onnx', '{folder}/a.onnx'])
def test_where_nothing_can_be_written_is_an_error_before_the_work(model, tmp_path, place) -> None:
    file = tmp_path / 'file'
    file.write_text('')
    (tmp_path / 'a.onnx').mkdir()
    out = place.format(file=file, folder=tmp_path)
    with pytest.raises(ExportError, match='--out: cannot write into|is a folder'):
        export((model[0], tmp_path / 'missing.pth'), out, '--overwrite')
    assert sorted(path.name for path in tmp_path.iterdir()) == ['a.onnx', 'file']


def test_a_model_without_numbers_is_not_written(model, tmp_path) -> None:
    weights = torch.load(model[1])
    weights['state_dict']['decode_head.conv_seg.bias'][1] = float('nan')
    torch.save(weights, tmp_path / 'burst.pth')
    with pytest.raises(ExportError, match='no numbers .NaN or infinity. on a tile'):
        export((model[0], tmp_path / 'burst.pth'), tmp_path / 'color.onnx')
    assert not (tmp_path / 'color.onnx').exists()


def test_a_map_equals_that_of_the_checkpoint(model, exported, tmp_path, capsys) -> None:
    scene = write_scene(tmp_path / 'town.tif', paint(150, 170), **UTM)
    options = [scene, '--confidence', '--tta', '--polygons']
    assert run_checkpoint(model, *options, '--out', tmp_path / 'by_torch') == 0
    capsys.readouterr()
    assert run(exported, *options, '--out', tmp_path / 'by_onnx') == 0
    assert 'ONNX Runtime' in capsys.readouterr().out
    assert (read(tmp_path / 'by_onnx' / 'town.tif') == paint(150, 170)).all()
    for name in ('town.tif', 'town_confidence.tif'):
        assert np.array_equal(read(tmp_path / 'by_onnx' / name), read(tmp_path / 'by_torch' / name))
    files = [
        sorted(path.name for path in (tmp_path / folder).iterdir())
        for folder in ('by_onnx', 'by_torch')
    ]
    assert files[0] == files[1]
    assert run(exported, *options, '--out', tmp_path / 'by_onnx') == 0
    assert 'skipped' in capsys.readouterr().out
    with pytest.raises(PredictError, match='was made with another model'):
        run(exported, *options, '--out', tmp_path / 'by_torch')


def test_a_fixed_batch_is_filled_up(model, tmp_path) -> None:
    scene = write_scene(tmp_path / 'town.tif', paint(150, 170))
    export(model, tmp_path / 'color.onnx', '--target', 'gcu', '--batch', '3')
    assert run(tmp_path / 'color.onnx', scene, '--out', tmp_path / 'maps') == 0
    assert (read(tmp_path / 'maps' / 'town.tif') == paint(150, 170)).all()
    assert run(tmp_path / 'color.onnx', scene, '--out', tmp_path / 'maps', '--batch-size', '3') == 0
    with pytest.raises(PredictError, match=r'--batch-size 4: .* takes 3 window.s. .*--batch 4'):
        run(tmp_path / 'color.onnx', scene, '--out', tmp_path / 'maps', '--batch-size', '4')
    predictor = ExportedModel(str(tmp_path / 'color.onnx'))
    assert predictor(np.zeros((2, 3, 64, 64), np.uint8)).shape == (2, 4, 64, 64)


def test_8_bits_are_calibrated_and_compared(model, tmp_path, capsys) -> None:
    out = tmp_path / 'color.onnx'
    assert export(model, out, '--int8', '--tiles', '4') == 0
    assert 'calibrated on 4 other tiles; 4 tiles of the val set' in capsys.readouterr().out
    kinds = {node.op_type for node in onnx.load(out).graph.node}
    assert {'QuantizeLinear', 'DequantizeLinear'} <= kinds
    scene = write_scene(tmp_path / 'town.tif', paint(80, 80))
    assert run(out, scene, '--out', tmp_path / 'maps') == 0
    assert (read(tmp_path / 'maps' / 'town.tif') == paint(80, 80)).all()
    with pytest.raises(ExportError, match='--int8 with --target gcu'):
        export(model, tmp_path / 'other.onnx', '--int8', '--target', 'gcu')
    with pytest.raises(ExportError, match='--int8 with --batch 5: 4 tile.* with --tiles 5'):
        export(model, tmp_path / 'other.onnx', '--int8', '--batch', '5', '--tiles', '4')


def test_8_bits_that_lose_too_much_are_not_written() -> None:
    assert is_close(Proof(4, 0.1, 0.99, 80.0, 79.5))
    assert not is_close(Proof(4, 0.1, 0.9, 80.0, 78.0))
    assert not is_close(Proof(4, 0.1, 1.0, float('nan'), float('nan')))


def without_key(exported: Path, path: Path, change: Any) -> Path:
    file = onnx.load(exported)
    keys = {each.key: each.value for each in file.metadata_props}
    del file.metadata_props[:]
    onnx.helper.set_model_props(file, change(keys))
    onnx.save(file, path)
    return path


def described(exported: Path) -> Any:
    return json.loads(
        {each.key: each.value for each in onnx.load(exported).metadata_props}['mapsage']
    )


def test_files_that_are_not_ours_are_errors(exported, tmp_path) -> None:
    scene = write_scene(tmp_path / 'town.tif', paint(80, 80))
    foreign = without_key(exported, tmp_path / 'a.onnx', lambda keys: dict(names='{}'))
    part = without_key(
        exported,
        tmp_path / 'b.onnx',
        lambda keys: dict(
            mapsage=json.dumps(
                {
                    key: value
                    for key, value in json.loads(keys['mapsage']).items()
                    if key not in ('window', 'bands')
                }
            )
        ),
    )
    (tmp_path / 'c.onnx').write_text('no model')
    future = onnx.load(exported)
    future.ir_version = 99
    onnx.save(future, tmp_path / 'd.onnx')
    for name, message in (
        ('a', "no key 'mapsage' in its metadata .found: names"),
        ('b', 'lacks bands, window, bands.count, bands.like_opencv'),
        ('c', 'cannot read .*c.onnx'),
        ('d', 'cannot read .*--target qgis'),
        ('e', 'e.onnx cannot be read: No such file'),
        ('', 'cannot be read: Is a directory'),
    ):
        with pytest.raises(PredictError, match=message):
            run(tmp_path / (name and f'{name}.onnx'), scene, '--out', tmp_path / 'maps')
    assert foreign.exists() and part.exists()
    with pytest.raises(PredictError, match='--window 32.*takes windows of 64'):
        run(exported, scene, '--out', tmp_path / 'maps', '--window', '32')
    with pytest.raises(SystemExit):
        run(exported, scene, '--out', tmp_path / 'maps', '--amp')


@pytest.mark.parametrize(
    'changes, message',
    [
        (None, 'lacks classes, palette, bands'),
        (dict(classes=None), 'cannot be read: .*None'),
        (dict(window='64'), "cannot be read: window is '64'"),
        (dict(palette=[['red']]), 'cannot be'),
    ],
)
def test_a_description_of_another_kind_is_an_error(exported, tmp_path, changes, message) -> None:
    content = '3' if changes is None else json.dumps(dict(described(exported), **changes))
    path = without_key(exported, tmp_path / 'a.onnx', lambda keys: dict(mapsage=content))
    with pytest.raises(PredictError, match=message):
        ExportedModel(str(path))


def test_a_scene_with_other_bands_is_an_error(exported, tmp_path) -> None:
    for count, hint in ((4, 'choose with --bands'), (1, '--bands 1 1 1')):
        scene = tmp_path / f'{count}.tif'
        with rasterio.open(
            scene,
            'w',
            driver='GTiff',
            height=80,
            width=80,
            count=count,
            dtype='uint8',
            photometric='MINISBLACK',
        ) as file:
            file.write(np.zeros((count, 80, 80), np.uint8))
        with pytest.raises(PredictError, match=f'{count} band.* are chosen, .*{hint}'):
            run(exported, scene, '--out', tmp_path / 'maps')


def test_a_scene_that_is_lost_costs_its_own_map(exported, tmp_path) -> None:
    for name in 'abc':
        write_scene(tmp_path / f'{name}.tif', paint(80, 80), **UTM)
    arguments = [
        '--model',
        str(exported),
        *(str(tmp_path / f'{name}.tif') for name in 'abc'),
        '--out',
        str(tmp_path / 'maps'),
        '--skip-broken',
    ]
    args = predict.build_parser(arguments).parse_args(arguments)
    prediction = Prediction(map_options(args), open_model(args, print), print)
    (tmp_path / 'b.tif').unlink()
    assert run_prediction(prediction, print) == PARTIAL
    assert sorted(path.name for path in (tmp_path / 'maps').glob('*.tif')) == ['a.tif', 'c.tif']


def test_names_and_numbers_of_processes(exported, tmp_path, monkeypatch) -> None:
    scene = write_scene(tmp_path / 'town.tif', paint(80, 80))
    for number, name in enumerate((b'\xc4\xa3\xd0\xcd 1.onnx', '\u6a21\u578b 1.onnx'.encode())):
        copy = os.path.join(os.fsencode(tmp_path), name)  # in GBK, which is no UTF-8
        shutil.copy(os.fsencode(exported), copy)
        assert run(os.fsdecode(copy), scene, '--out', tmp_path / f'maps{number}') == 0
        assert (read(tmp_path / f'maps{number}' / 'town.tif') == paint(80, 80)).all()
    # A pod of a PyTorchJob has this variable; processes share their maps without a launcher.
    monkeypatch.setenv('WORLD_SIZE', '2')
    assert run(exported, scene, '--out', tmp_path / 'shared') == 0
    found = subprocess.run(
        [
            'bash',
            str(ROOT / 'scripts' / 'predict.sh'),
            '--model',
            exported,
            scene,
            '--out',
            tmp_path / 'maps',
        ],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2 and 'python tools/predict.py --model' in found.stderr
    assert not (tmp_path / 'maps').exists()


def test_openvino_makes_the_same_map(exported, tmp_path, capsys) -> None:
    pytest.importorskip('openvino')
    scene = write_scene(tmp_path / 'town.tif', paint(150, 170), **UTM)
    assert run(exported, scene, '--out', tmp_path / 'maps', '--runtime', 'openvino') == 0
    assert 'OpenVINO' in capsys.readouterr().out
    assert (read(tmp_path / 'maps' / 'town.tif') == paint(150, 170)).all()
    foreign = without_key(exported, tmp_path / 'a.onnx', lambda keys: {})
    for path, message in ((foreign, "no key 'mapsage' .*none"), (scene, 'OpenVINO cannot read')):
        with pytest.raises(PredictError, match=message):
            run(path, scene, '--out', tmp_path / 'other', '--runtime', 'openvino')


def test_openvino_is_asked_for_by_its_name(exported, tmp_path) -> None:
    if importlib.util.find_spec('openvino') is not None:
        pytest.skip('OpenVINO is installed')
    scene = write_scene(tmp_path / 'town.tif', paint(80, 80))
    with pytest.raises(PredictError, match='--runtime openvino needs pip install openvino'):
        run(exported, scene, '--out', tmp_path / 'maps', '--runtime', 'openvino')


def test_a_map_needs_neither_torch_nor_the_mm_packages(exported, tmp_path) -> None:
    scene = write_scene(tmp_path / 'town.tif', paint(150, 170), **UTM)
    picture = tmp_path / 'village.png'
    cv2.imwrite(str(picture), COLORS[paint(90, 100)][:, :, ::-1])
    found = subprocess.run(
        [
            sys.executable,
            '-c',
            WITHOUT_HOSTS,
            '--model',
            exported,
            scene,
            picture,
            '--out',
            tmp_path / 'maps',
            '--probabilities',
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    assert (read(tmp_path / 'maps' / 'town.tif') == paint(150, 170)).all()
    assert (read(tmp_path / 'maps' / 'village.tif') == paint(90, 100)).all()


def test_an_error_is_printed_once_and_the_status_is_1(tmp_path, monkeypatch, capfd) -> None:
    missing = str(tmp_path / 'no.onnx')
    monkeypatch.setattr(sys, 'argv', ['predict.py', f'--model={missing}', 'a.tif', '--out', 'maps'])
    monkeypatch.chdir(tmp_path)
    write_scene(tmp_path / 'a.tif', paint(80, 80))
    with pytest.raises(SystemExit) as ended:
        predict.run()
    assert ended.value.code == 1
    assert capfd.readouterr().err == f'model {missing} cannot be read: No such file or directory.\n'
