"""Maps of places that several sensors show at several dates."""

from __future__ import annotations

import numpy as np
import pytest
import rasterio
import torch
from map_runs import read, run
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from stack_files import (
    DATES,
    PIPELINE,
    SENSORS,
    SIZE,
    build_stacks,
    grid,
    save_weights,
    write_list,
    write_model,
    write_place,
)
from support import check_finished, launch, main_leg

from mapsage.commands import predict
from mapsage.commands.predict import PARTIAL, map_options, open_model, run_prediction
from mapsage.maps.errors import PredictError
from mapsage.maps.prediction import Prediction


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    """Config and checkpoint of a model, and the folder of its training places."""
    root = tmp_path_factory.mktemp('training')
    write_place(root)
    config = write_model(root, SENSORS)
    return config, save_weights(config, dict(s2=[15, 111, 202], s1=[15, 111]))


def test_a_map_has_the_classes_that_the_dataset_and_model_give(model, tmp_path, capsys):
    write_place(tmp_path / 'new', 'b', 1)
    assert run(model, tmp_path / 'new', '--out', tmp_path / 'maps', '--overlap', 0) == 0
    dataset = build_stacks(tmp_path / 'new', labels=None, pipeline=[PIPELINE[0], PIPELINE[2]])
    with DefaultScope.overwrite_default_scope('mmseg'):
        segmentor = MODELS.build(Config.fromfile(str(model[0])).model).eval()
    segmentor.load_state_dict(torch.load(str(model[1]))['state_dict'])
    expected = np.zeros((SIZE, SIZE), np.uint8)
    for index in range(4):
        sample = dataset[index]
        with torch.no_grad():
            batch = segmentor.data_preprocessor(
                dict(inputs=[sample['inputs']], data_samples=[sample['data_samples']])
            )
            classes = segmentor.encode_decode(
                batch['inputs'], [dict(img_shape=(32, 32), ori_shape=(32, 32))]
            ).argmax(1)[0]
        column, row, _ = dataset.get_data_info(index)['window']
        expected[row : row + 32, column : column + 32] = classes
    assert 0.02 < expected.mean() < 0.98
    classes = read(tmp_path / 'maps/b.tif')
    assert (classes == expected).mean() > 0.999
    with rasterio.open(tmp_path / 'maps/b.tif') as file:
        assert file.crs.to_epsg() == 32633 and file.transform == grid(1)['transform']
    assert (tmp_path / 'maps/preview.png').exists()
    capsys.readouterr()
    assert run(model, tmp_path / 'new', '--out', tmp_path / 'maps', '--overlap', 0) == 0
    assert 'made with the same settings: skipped' in capsys.readouterr().out


def test_the_config_in_a_work_dir_makes_the_same_map(model, tmp_path):
    """MMEngine sorts the keys of a config that it writes, the sensors among them."""
    write_place(tmp_path / 'new', 'b', 1)
    written = tmp_path / 'written.py'
    Config.fromfile(str(model[0])).dump(str(written))
    assert list(Config.fromfile(str(written)).model.backbone.sensors) == ['s1', 's2']
    maps = []
    for number, config in enumerate((model[0], written)):
        assert run((config, model[1]), tmp_path / 'new', '--out', tmp_path / str(number)) == 0
        maps.append(read(tmp_path / str(number) / 'b.tif'))
    assert maps[0].shape == (SIZE, SIZE) and np.array_equal(*maps)


def test_a_place_without_a_date_of_training_says_so(model, tmp_path, capsys):
    write_place(tmp_path / 'new', 'b', 1, DATES[:2], ())
    write_place(tmp_path / 'new', 'c', 2)
    assert run(model, tmp_path / 'new', '--out', tmp_path / 'maps', '--tta', '--polygons') == 0
    lines = capsys.readouterr().out
    assert "place 'b' has no image of s2 within 30 days of day(s) 202 of the year" in lines
    assert "place 'b' has no image of sensor 's1'" in lines and "place 'c'" not in lines
    assert (read(tmp_path / 'maps/b.tif') < 2).all() and (tmp_path / 'maps/c.gpkg').exists()


def test_a_list_names_the_place_and_clouded_pixels_have_no_class(model, tmp_path):
    root = tmp_path / 'new'
    write_place(root, 'b', 1, DATES[:1], ())
    with rasterio.open(root / f's2/b_{DATES[0]}.tif', 'r+') as file:
        file.nodata = 0
        values = file.read()
        values[:, :10, :20] = 0
        file.write(values)
    write_list(root / 'list.csv', [('north field', 's2', DATES[0], f's2/b_{DATES[0]}.tif')])
    assert run(model, root / 'list.csv', '--out', tmp_path / 'maps') == 0
    classes = read(tmp_path / 'maps/north field.tif')
    assert (classes[:10, :20] == 255).all() and (classes == 255).sum() == 200


@main_leg
def test_ranks_give_the_same_bytes(model, tmp_path):
    write_place(tmp_path / 'new', 'b', 1, DATES, DATES[:1])
    names = 'b.tif', 'b_confidence.tif', 'b.json'
    options = '--confidence', '--window', 16
    assert run(model, tmp_path / 'new', '--out', tmp_path / 'maps1', *options) == 0
    for ranks in (2, 3):
        finished = launch(
            *model,
            tmp_path / 'new',
            '--out',
            tmp_path / f'maps{ranks}',
            *options,
            ranks=ranks,
            command=['bash', 'scripts/predict.sh'],
            environ=dict(ACCELERATOR='cpu'),
        )
        check_finished(finished)
        assert f'on {ranks} rank(s)' in finished.output
        for name in names:
            assert (tmp_path / f'maps{ranks}' / name).read_bytes() == (
                tmp_path / 'maps1' / name
            ).read_bytes(), name


@pytest.mark.parametrize(
    'arguments, message',
    [
        (('--mosaic', 'all'), '--mosaic: the model takes scene stacks'),
        (('--bands', '1', '2'), '--bands: the model takes scene stacks'),
        (('--scale', '2'), '--scale: the model takes scene stacks'),
    ],
)
def test_options_for_single_scenes_are_refused(model, tmp_path, arguments, message):
    write_place(tmp_path / 'new', 'b', 1)
    with pytest.raises(PredictError, match=message):
        run(model, tmp_path / 'new', '--out', tmp_path / 'maps', *arguments)


def test_inputs_without_a_place_are_errors(model, tmp_path):
    with pytest.raises(PredictError, match='no file matches'):
        run(model, tmp_path, '--out', tmp_path / 'maps')
    with pytest.raises(PredictError, match='does not exist; expected a folder with files'):
        run(model, tmp_path / 'absent', '--out', tmp_path / 'maps')


def test_a_place_that_loses_a_date_costs_its_own_map(model, tmp_path):
    """The file is lost after the plan. Its place has no map, with `--skip-broken`."""
    for name in ('b', 'c'):
        write_place(tmp_path / 'new', name, 1)
    arguments = [
        *map(str, model),
        str(tmp_path / 'new'),
        '--out',
        str(tmp_path / 'maps'),
        '--skip-broken',
        '--accelerator',
        'cpu',
    ]
    args = predict.build_parser(arguments).parse_args(arguments)
    lines = []
    prediction = Prediction(map_options(args), open_model(args, lines.append), lines.append)
    lost = sorted((tmp_path / 'new').rglob('*b*.tif'))[-1]
    lost.unlink()
    assert run_prediction(prediction, lines.append) == PARTIAL
    assert [path.name for path in (tmp_path / 'maps').glob('*.tif')] == ['c.tif']
    assert any('skipped' in line and lost.name in line for line in lines)
