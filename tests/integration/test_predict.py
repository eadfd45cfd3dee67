"""tools/predict.py from a scene to a map that a GIS opens: right to the pixel, however it ran."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, List, Tuple

import cv2
import numpy as np
import pyogrio
import pytest
import rasterio
import rasterio.shutil
import torch
from color_model import COLORS, NAMES, paint, write_checkpoint, write_config, write_scene
from mmengine import Config
from mmseg.registry import MODELS
from mmseg.utils import register_all_modules
from PIL import Image
from ranks import free_port
from rasterio.transform import Affine
from support import (
    ON_MAIN_LEG,
    ROOT,
    TINY_CONFIG,
    Finished,
    Launch,
    check_finished,
    main_leg,
    no_simulated_cards,
)

from mapsage.accelerator import ACCELERATORS, current_accelerator
from mapsage.commands import predict as command
from mapsage.commands.predict import PARTIAL
from mapsage.extras.viewer import find_maps
from mapsage.extras.viewer.display import scene_for_display
from mapsage.geo import GeoError
from mapsage.maps.errors import PredictError

UTM = dict(crs='EPSG:32633', transform=Affine(0.5, 0, 500000, 0, -0.5, 5000000))
DEGREES = dict(crs='EPSG:4326', transform=Affine(1e-5, 0, 11.5, 0, -1e-5, 48.1))
TILED = dict(tiled=True, blockxsize=64, blockysize=64, compress='deflate')
CODE = {'PYTHONPATH': str(ROOT / 'tests')}


@pytest.fixture(scope='module')
def model(tmp_path_factory) -> Tuple[Path, Path]:
    """The config and the checkpoint of the model that knows four colors."""
    folder = tmp_path_factory.mktemp('model')
    return write_config(folder), write_checkpoint(folder)


def run(model: Tuple[Path, Path], *arguments: Any, accelerator: str = 'cpu') -> int:
    """Run the command in this process."""
    return command.main([*map(str, model), *map(str, arguments), '--accelerator', accelerator])


def start(model: Tuple[Path, Path], *arguments: Any, ranks: int = 0, **environ: str) -> Launch:
    """Start the command, or with ranks its launcher, in separate processes."""
    program = ['bash', 'scripts/predict.sh'] if ranks else [sys.executable, 'tools/predict.py']
    return Launch(
        *model,
        *arguments,
        ranks=ranks or 1,
        command=program,
        environ={**CODE, 'ACCELERATOR': 'cpu', **environ},
    )


def read(path: Path) -> np.ndarray:
    with rasterio.open(path) as file:
        return file.read(1)


def read_polygons(path: Path) -> Tuple[str, dict]:
    """Return the CRS of a GeoPackage and its fields by name."""
    info, _, _, fields = pyogrio.raw.read(path, layer='map')
    return info['crs'], dict(zip(info['fields'], fields))


def hidden(folder: Path) -> List[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith('.')]


def validate(path: Path) -> None:
    """Check that it is a Cloud Optimized GeoTIFF, where the leg has the validator."""
    cogeo = pytest.importorskip('rio_cogeo') if sys.version_info >= (3, 11) else None
    if cogeo is not None:
        valid, errors, warnings = cogeo.cog_validate(str(path), quiet=True)
        assert valid and not errors and not warnings


@pytest.fixture(scope='module')
def utm(model: Tuple[Path, Path], tmp_path_factory) -> Tuple[np.ndarray, Path, Finished]:
    """A scene's classes, the folder of its outputs, and what the command said."""
    folder = tmp_path_factory.mktemp('utm')
    classes = paint(200, 310)
    scene = write_scene(folder / 'field.tif', classes, **UTM, **TILED)
    finished = start(model, scene, '--out', folder / 'maps', '--confidence', '--polygons').finish()
    check_finished(finished)
    return classes, folder / 'maps', finished


def test_a_scene_becomes_a_map_that_is_right_to_the_pixel(utm: Any) -> None:
    classes, folder, _ = utm
    with rasterio.open(folder / 'field.tif') as file:
        np.testing.assert_array_equal(file.read(1), classes)
        assert file.crs.to_epsg() == 32633 and file.transform == UTM['transform']
        assert tuple(file.bounds) == (500000, 4999900, 500155, 5000000)
        assert file.nodata == 255 and file.colormap(1)[0][:3] == (255, 0, 0)
        assert [each['name'] for each in json.loads(file.tags()['MAPSAGE_CLASSES'])] == list(NAMES)
    validate(folder / 'field.tif')
    validate(folder / 'field_confidence.tif')
    with rasterio.open(folder / 'field_confidence.tif') as file:
        assert file.read(1).min() > 90 and file.read(1).max() <= 100
        assert file.crs.to_epsg() == 32633 and file.transform == UTM['transform']


def test_its_polygons_have_the_areas_of_their_pixels(utm: Any) -> None:
    classes, folder, _ = utm
    crs, columns = read_polygons(folder / 'field.gpkg')
    assert 'EPSG' in crs and '32633' in crs
    for number, name in enumerate(NAMES[:3]):
        mine = columns['class_name'] == name
        pixels = int((classes == number).sum())
        assert columns['area_px'][mine].tolist() == [pixels]
        # The grid of UTM is within 0.1 % of the ellipsoid's meters.
        assert columns['area_m2'][mine][0] == pytest.approx(pixels * 0.25, rel=2e-3)
    assert columns['area_px'].sum() == classes.size


def test_the_options_of_polygons_apply_to_a_map_that_is_finished(
    model: Tuple[Path, Path], tmp_path: Path
) -> None:
    classes = paint(60, 80)
    classes[2, 3] = 2  # a single pixel
    scene = write_scene(tmp_path / 'a.tif', classes, **UTM)
    options = [scene, '--out', tmp_path, '--window', 32, '--polygons']
    for more, smallest, left_out in (
        ([], 1, set()),
        (['--min-area', '2'], 2, set()),
        ([], 1, set()),
        (['--skip-class', *NAMES[:2], '--simplify', '0'], 1, set(NAMES[:2])),
    ):
        assert run(model, *options[:2], tmp_path / 'out', *options[3:], *more) == 0
        columns = read_polygons(tmp_path / 'out' / 'a.gpkg')[1]
        assert columns['area_px'].min() >= smallest
        assert set(columns['class_name']) == {NAMES[i] for i in np.unique(classes)} - left_out
        assert (columns['area_px'] == 1).any() == (smallest == 1)
    with pytest.raises(PredictError, match='--skip-class sea: the classes are'):
        run(model, *options[:2], tmp_path / 'out', *options[3:], '--skip-class', 'sea')


def test_it_leaves_a_picture_and_says_where_everything_is(utm: Any) -> None:
    classes, folder, finished = utm
    picture = cv2.imread(str(folder / 'preview.png'))
    assert picture.shape[0] > 500 and picture.shape[1] > 1500 and picture.std() > 20
    # the map's pure blue, in OpenCV's order
    assert (picture == (255, 0, 0)).all(-1).sum() > 10000
    assert (picture == COLORS[2][::-1]).all(-1).sum() > 10000
    share = 100 * (classes == 2).mean()
    for words in (
        f'blue {share:.1f} %',
        'field.tif, field_confidence.tif, field.gpkg, preview.png',
        's on 1 rank(s): ',
        '310x200 pixels',
        '4 polygons',
    ):
        assert words in finished.output
    assert hidden(folder) == [] and 'no georeference' not in finished.output


def test_a_folder_of_images_in_pixels_degrees_and_with_holes(
    model: Tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    """All inputs of one command: PNG, a scene in degrees, one smaller than a window, no data."""
    inputs, out = tmp_path / 'inputs', tmp_path / 'out'
    inputs.mkdir()
    classes = paint(150, 170)
    pictures = COLORS[classes]
    cv2.imwrite(str(inputs / 'picture.png'), pictures[:, :, ::-1])
    cv2.imwrite(str(inputs / 'small.png'), pictures[60:80, 40:80, ::-1])
    write_scene(inputs / 'degrees.tif', classes, **DEGREES, **TILED)
    holes = classes.copy()
    holes[:70, :90] = 255
    write_scene(inputs / 'holes.tif', holes, **UTM, nodata=0)
    write_scene(inputs / 'empty.tif', np.full((90, 90), 255, np.uint8), **UTM, nodata=0)
    (inputs / 'notes.txt').write_text('not an image')
    assert run(model, inputs, '--out', out, '--polygons') == 0
    said = capsys.readouterr().out
    np.testing.assert_array_equal(read(out / 'picture.tif'), classes)
    np.testing.assert_array_equal(read(out / 'small.tif'), classes[60:80, 40:80])
    np.testing.assert_array_equal(read(out / 'degrees.tif'), classes)
    np.testing.assert_array_equal(read(out / 'holes.tif'), holes)
    assert (read(out / 'empty.tif') == 255).all()
    assert 'warning: no data anywhere' in said
    assert said.count('no georeference') == 1 and 'picture.png and 1 more' in said
    with rasterio.open(out / 'degrees.tif') as file:
        assert file.crs.to_epsg() == 4326 and file.transform == DEGREES['transform']
    columns = read_polygons(out / 'degrees.gpkg')[1]
    areas = dict(zip(columns['class_name'], columns['area_m2']))
    # A degree at 48.0993 N on WGS 84: 111,198 m of latitude, 74,498 m of longitude.
    assert areas['green'] == pytest.approx((classes == 1).sum() * 1.11198 * 0.74498, rel=1e-3)
    assert sorted(path.name for path in out.glob('*_preview.png')) == [
        f'{name}_preview.png' for name in ('degrees', 'empty', 'holes', 'picture', 'small')
    ]


def test_one_window_is_what_mmseg_predicts_bit_for_bit(tmp_path: Path) -> None:
    from mmengine.config import Config
    from mmengine.registry import DefaultScope
    from mmseg.apis import inference_model, init_model

    config = tmp_path / 'tiny.py'
    config.write_text(TINY_CONFIG.replace('{data_root!r}', "''"))
    cfg = Config.fromfile(str(config))
    torch.manual_seed(3)
    with DefaultScope.overwrite_default_scope('mmseg'):
        net = init_model(cfg, device='cpu')
    meta = dict(dataset_meta=dict(classes=list('abcdefg')))
    torch.save(dict(state_dict=net.state_dict(), meta=meta), tmp_path / 'tiny.pth')
    noise = np.random.RandomState(0).randint(0, 255, (9, 9, 3)).astype(np.uint8)
    picture = cv2.resize(noise, (96, 96), interpolation=cv2.INTER_CUBIC)
    cv2.imwrite(str(tmp_path / 'picture.png'), picture)
    with rasterio.open(
        tmp_path / 'scene.tif',
        'w',
        driver='GTiff',
        height=96,
        width=96,
        count=3,
        dtype='uint8',
        **UTM,
    ) as file:
        file.write(picture[:, :, ::-1].transpose(2, 0, 1))
    cv2.imwrite(str(tmp_path / 'photo.jpg'), picture)
    cv2.imwrite(str(tmp_path / 'gray.png'), picture[:, :, 0])
    # GDAL decodes a JPEG to other colors than OpenCV, and gives a gray picture one band.
    for name, of in (
        ('picture.png', 'picture.png'),
        ('scene.tif', 'picture.png'),
        ('photo.jpg', 'photo.jpg'),
        ('gray.png', 'gray.png'),
    ):
        with DefaultScope.overwrite_default_scope('mmseg'):
            predicted = inference_model(net, str(tmp_path / of))
        expected = predicted.pred_sem_seg.data[0].numpy()
        assert len(np.unique(expected)) > 2
        out = tmp_path / name.split('.')[0]
        assert (
            run((config, tmp_path / 'tiny.pth'), tmp_path / name, '--out', out, '--window', 96) == 0
        )
        np.testing.assert_array_equal(read(out / f'{out.name}.tif'), expected)


@pytest.mark.parametrize('name', ['sim', 'xla'])
def test_other_accelerators_give_the_same_map(
    model: Tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    kind = next(kind for kind in ACCELERATORS if kind.name == name)
    reason = no_simulated_cards() if name == 'sim' else kind.why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    classes = paint(90, 150)  # batches that are not full
    scene = write_scene(tmp_path / 'field.tif', classes, **UTM)
    assert run(model, scene, '--out', tmp_path / 'out', '--tta', accelerator=name) == 0
    assert current_accelerator().name == name
    np.testing.assert_array_equal(read(tmp_path / 'out' / 'field.tif'), classes)


def test_killed_and_started_again_it_gives_the_same_bytes(
    model: Tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    scene = write_scene(tmp_path / 'field.tif', paint(500, 90), **UTM)
    assert run(model, scene, '--out', tmp_path / 'whole', '--confidence') == 0
    options = (scene, '--out', tmp_path / 'again', '--confidence')
    killed = start(model, *options, COLOR_SECONDS='0.4')
    (tmp_path / 'again').mkdir()
    work = None
    while work is None or not (work / 'strip000001').exists():
        found = [path for path in (tmp_path / 'again').iterdir() if path.name.startswith('.field')]
        work = found[0] if found else None
        assert killed.process.poll() is None
        time.sleep(0.02)
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.finish()
    assert not (tmp_path / 'again' / 'field.tif').exists()
    (work / 'strip000001').write_bytes(b'half')  # as after a power cut
    parts = len(list(work.glob('strip*')))
    capsys.readouterr()
    with pytest.raises(PredictError, match='window'):  # parts of other settings stay apart
        run(model, scene, '--out', tmp_path / 'whole', '--confidence', '--window', 48)
    assert run(model, *options) == 0
    assert f'continues, {parts - 1} of' in capsys.readouterr().out
    for name in ('field.tif', 'field_confidence.tif', 'field.json', 'preview.png'):
        again = (tmp_path / 'again' / name).read_bytes()
        assert again == (tmp_path / 'whole' / name).read_bytes(), name
    assert hidden(tmp_path / 'again') == []
    # finished: skipped, made again, or completed
    before = (tmp_path / 'again' / 'field.tif').stat().st_mtime_ns
    assert run(model, *options, '--polygons') == 0
    assert 'skipped' in capsys.readouterr().out
    assert (tmp_path / 'again' / 'field.gpkg').exists()
    assert (tmp_path / 'again' / 'field.tif').stat().st_mtime_ns == before
    assert run(model, *options, '--overwrite') == 0
    assert (tmp_path / 'again' / 'field.tif').stat().st_mtime_ns > before
    assert not (tmp_path / 'again' / 'field.gpkg').exists()  # of the map before


def test_ranks_share_a_scene_and_give_the_same_bytes(
    model: Tuple[Path, Path], utm: Any, tmp_path: Path
) -> None:
    ranks = 3 if ON_MAIN_LEG else 2
    finished = start(
        model,
        utm[1].parent / 'field.tif',
        '--out',
        tmp_path,
        '--confidence',
        '--polygons',
        ranks=ranks,
    ).finish()
    check_finished(finished)
    for name in ('field.tif', 'field_confidence.tif', 'field.json'):
        assert (tmp_path / name).read_bytes() == (utm[1] / name).read_bytes(), name
    assert f'on {ranks} rank(s)' in finished.output and hidden(tmp_path) == []


@main_leg
def test_a_rank_that_dies_is_named_by_the_others(model: Tuple[Path, Path], tmp_path: Path) -> None:
    scene = write_scene(tmp_path / 'field.tif', paint(900, 90), **UTM)
    port, processes = str(free_port()), []
    for rank in range(2):
        processes.append(
            start(
                model,
                scene,
                '--out',
                tmp_path / 'out',
                '--launcher',
                'pytorch',
                '--accelerator',
                'cpu',
                RANK=str(rank),
                WORLD_SIZE='2',
                LOCAL_RANK=str(rank),
                MASTER_PORT=port,
                MASTER_ADDR='127.0.0.1',
                COLOR_SECONDS='0.3' if rank else '0',
            )
        )
    try:
        (tmp_path / 'out').mkdir(exist_ok=True)
        while not list((tmp_path / 'out').glob('.field.*/strip*')):
            assert processes[0].process.poll() is None
            time.sleep(0.02)
        os.kill(processes[1].process.pid, signal.SIGKILL)
        survivor = processes[0].finish()
    finally:
        for each in processes:
            each.process.kill()
            each.finish()
    assert survivor.status == 1
    assert 'rank(s) [1]' in survivor.output and 'RankLostError' in survivor.output
    # It has taken over the strips of the other.
    assert run(model, scene, '--out', tmp_path / 'whole') == 0
    field = (tmp_path / 'out' / 'field.tif').read_bytes()
    assert field == (tmp_path / 'whole' / 'field.tif').read_bytes()


def test_a_damaged_block_is_named_and_only_its_pixels_are_lost(
    model: Tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    classes = paint(320, 320)
    scene = write_scene(tmp_path / 'field.tif', classes, **UTM, **TILED)
    with rasterio.open(scene) as file:
        offset = (
            int(file.tags(1, ns='TIFF')['BLOCK_OFFSET_2_2'])
            if 'BLOCK_OFFSET_2_2' in file.tags(1, ns='TIFF')
            else int(file.get_tag_item('BLOCK_OFFSET_2_2', 'TIFF', bidx=1))
        )
    with open(scene, 'r+b') as file:
        file.seek(offset)
        file.write(b'\xff' * 40)
    if ON_MAIN_LEG:
        finished = start(model, scene, '--out', tmp_path / 'ranks', ranks=2).finish()
        assert finished.status == PARTIAL and 'partial: ' in finished.final_error
    assert run(model, scene, '--out', tmp_path / 'out') == PARTIAL == 3
    said = capsys.readouterr().out
    expected = classes.copy()
    expected[128:192, 128:192] = 255
    np.testing.assert_array_equal(read(tmp_path / 'out' / 'field.tif'), expected)
    assert '(128, 128, 64, 64)' in said and 'status 3' in said
    # still true when it is asked again
    assert run(model, scene, '--out', tmp_path / 'out') == PARTIAL


def test_a_picture_that_cannot_be_decoded_does_not_stop_the_others(
    model: Tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    classes = paint(80, 100)
    (tmp_path / 'in').mkdir()
    for name in ('cut', 'whole'):
        cv2.imwrite(str(tmp_path / 'in' / f'{name}.png'), COLORS[classes][:, :, ::-1])
    data = (tmp_path / 'in' / 'cut.png').read_bytes()
    (tmp_path / 'in' / 'cut.png').write_bytes(data[: len(data) // 2])
    assert run(model, tmp_path / 'in', '--out', tmp_path / 'out') == PARTIAL
    assert 'OpenCV cannot decode it' in capsys.readouterr().out
    assert (read(tmp_path / 'out' / 'cut.tif') == 255).all()
    np.testing.assert_array_equal(read(tmp_path / 'out' / 'whole.tif'), classes)


def test_broken_files_of_a_folder_are_named_at_the_start(
    model: Tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    """Two of five: all are named before the first map, and --skip-broken maps the others."""
    classes = paint(80, 100)
    (tmp_path / 'in').mkdir()
    for name in 'acde':
        write_scene(tmp_path / f'in/{name}.tif', classes, **UTM)
    (tmp_path / 'in/b.tif').write_bytes(b'II*\0 of a download that ended')
    (tmp_path / 'in/d.tif').write_bytes(b'')
    out = tmp_path / 'out'
    with pytest.raises(
        PredictError,
        match=r'2 of 5 input\(s\) cannot be mapped: .*in/b\.tif.*'
        r'in/d\.tif.*--skip-broken maps the others',
    ):
        run(model, tmp_path / 'in', '--out', out)
    assert list(out.glob('*.tif')) == []
    for _ in range(2):  # the second time all of them are there
        assert run(model, tmp_path / 'in', '--out', out, '--skip-broken') == PARTIAL
        output = capsys.readouterr().out
        assert 'in/b.tif' in output and 'in/d.tif' in output and '2 of 5 input(s) skipped' in output
        assert sorted(path.name for path in out.glob('*.tif')) == ['a.tif', 'c.tif', 'e.tif']
    np.testing.assert_array_equal(read(out / 'e.tif'), classes)
    with pytest.raises(PredictError, match='no raster that GDAL reads'):
        run(model, tmp_path / 'in/b.tif', '--out', out, '--skip-broken')


def test_a_full_disk_leaves_nothing_under_a_final_name(
    model: Tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    random = np.random.RandomState(0).randint(0, 4, (400, 400)).astype(np.uint8)
    scene = write_scene(tmp_path / 'field.tif', random, **UTM)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (2000, 30000):  # a strip does not fit; the strips do, and the map does not
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises((PredictError, GeoError), match='[Ff]ree'):
                run(model, scene, '--out', tmp_path / 'out')
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [
            path.name for path in (tmp_path / 'out').iterdir() if not path.name.startswith('.')
        ] == []
    capsys.readouterr()
    assert run(model, scene, '--out', tmp_path / 'out') == 0
    assert 'continues, 8 of 8' in capsys.readouterr().out
    np.testing.assert_array_equal(read(tmp_path / 'out' / 'field.tif'), random)
    assert hidden(tmp_path / 'out') == []


def test_the_order_of_bands_is_the_one_named(model: Tuple[Path, Path], tmp_path: Path) -> None:
    classes = paint(80, 80)
    with rasterio.open(
        tmp_path / 'four.tif',
        'w',
        driver='GTiff',
        height=80,
        width=80,
        count=4,
        dtype='uint8',
        photometric='minisblack',
        **UTM,
    ) as file:
        colors = COLORS[classes].transpose(2, 0, 1)
        file.write(np.concatenate([np.full_like(colors[:1], 7), colors[::-1]]))
        file.colorinterp = [rasterio.enums.ColorInterp.gray] * 4
    with pytest.raises(PredictError, match=r'4 band\(s\).* takes 3: choose with --bands'):
        run(model, tmp_path / 'four.tif', '--out', tmp_path / 'out')
    with pytest.raises(PredictError, match='no band'):
        run(model, tmp_path / 'four.tif', '--out', tmp_path / 'out', '--bands', 4, 3, 5)
    assert run(model, tmp_path / 'four.tif', '--out', tmp_path / 'out', '--bands', 4, 3, 2) == 0
    np.testing.assert_array_equal(read(tmp_path / 'out' / 'four.tif'), classes)


def test_what_cannot_be_predicted_is_said_before_anything_is_written(
    model: Tuple[Path, Path], tmp_path: Path
) -> None:
    config, checkpoint = model
    scene = write_scene(tmp_path / 'field.tif', paint(80, 80), **UTM)
    (tmp_path / 'notes.txt').write_text('not an image')
    (tmp_path / 'none').mkdir()
    (tmp_path / 'twice').mkdir()
    cv2.imwrite(str(tmp_path / 'twice' / 'field.png'), np.zeros((80, 80, 3), np.uint8))
    with rasterio.open(
        tmp_path / 'deep.tif',
        'w',
        driver='GTiff',
        height=80,
        width=80,
        count=3,
        dtype='uint16',
        **UTM,
    ) as file:
        file.write(np.ones((3, 80, 80), np.uint16))
    out = tmp_path / 'out'
    for words, arguments in (
        ('no.tif does not exist', [tmp_path / 'no.tif']),
        ('no raster that GDAL reads', [tmp_path / 'notes.txt']),
        ('holds no image', [tmp_path / 'none']),
        ('would both become field.tif', [scene, tmp_path / 'twice']),
        ('holds uint16', [tmp_path / 'deep.tif']),
        ('--window 64 and --overlap 64', [scene, '--overlap', 64]),
    ):
        with pytest.raises(PredictError, match=words):
            run(model, *arguments, '--out', out)
    with pytest.raises(PredictError, match='would overwrite'):
        run(model, scene, '--out', tmp_path)
    foreign = tmp_path / 'foreign.pth'
    torch.save(dict(state_dict={'backbone.stem': torch.zeros(1)}), foreign)
    other = tmp_path / 'other.pth'
    torch.save(
        dict(
            state_dict={
                'decode_head.conv_seg.weight': torch.zeros(6, 3, 1, 1),
                'decode_head.conv_seg.bias': torch.zeros(6),
            }
        ),
        other,
    )
    for words, path in (
        ('2 missing: decode_head.conv_seg.weight', foreign),
        ('1 left over: backbone.stem', foreign),
        (r'is \(6, 3, 1, 1\), expected \(4, 3, 1, 1\)', other),
        ('does not exist', tmp_path / 'no.pth'),
        ('cannot be read', scene),
    ):
        with pytest.raises(PredictError, match=words):
            run((config, path), scene, '--out', out)
    nameless = write_config(tmp_path, "del test_dataloader['dataset']['metainfo']\n")
    with pytest.raises(PredictError, match='names classes'):
        run((nameless, checkpoint), scene, '--out', out)
    few = write_config(tmp_path, "test_dataloader['dataset']['metainfo']['classes'] = ('a', 'b')\n")
    with pytest.raises(PredictError, match='has 4 classes, but .* 2: a, b'):
        run((few, checkpoint), scene, '--out', out)
    assert not out.exists() or list(out.iterdir()) == []


def test_a_map_that_is_not_ours_is_not_overwritten(
    model: Tuple[Path, Path], tmp_path: Path
) -> None:
    scene = write_scene(tmp_path / 'field.tif', paint(80, 80), **UTM)
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'field.tif').write_text("somebody else's")
    with pytest.raises(PredictError, match='exists.*--overwrite'):
        run(model, scene, '--out', tmp_path / 'out')
    assert (tmp_path / 'out' / 'field.tif').read_text() == "somebody else's"


BANDS = """
model.update(
    backbone=dict(type='EfficientNetLite', in_channels=5, bands=dict(rgb=(3, 2, 0)), out_indices=(0,)),
    data_preprocessor=dict(type='BandDataPreProcessor', mean=[0.] * 5, std=[1.] * 5))
model['decode_head'].update(in_channels=24, channels=24)
test_dataloader['dataset'] = dict(
    type='GeoTiffDataset', scenes='x', window=64, bands=[6, 5, 4, 3, 2],
    metainfo=test_dataloader['dataset']['metainfo'],
    pipeline=[dict(type='LoadGeoTiffWindow'), dict(type='PackSegInputs')])
"""


def test_pictures_show_the_bands_that_the_model_calls_red_green_and_blue(tmp_path: Path) -> None:
    """The preview and the viewer read the same bands; ``--bands`` of the viewer chooses others."""
    config, checkpoint = write_config(tmp_path, BANDS), tmp_path / 'bands.pth'
    register_all_modules(init_default_scope=False)
    with MODELS.switch_scope_and_registry('mmseg') as registry:
        network = registry.build(Config.fromfile(config).model)
    torch.save(dict(state_dict=network.state_dict()), checkpoint)
    scene = tmp_path / 'six.tif'
    values = np.array([10, 40, 80, 120, 160, 200], np.uint8)[:, None, None]
    with rasterio.open(
        scene, 'w', driver='GTiff', width=64, height=64, count=6, dtype='uint8', **UTM
    ) as file:
        file.write(np.broadcast_to(values, (6, 64, 64)))
    out = tmp_path / 'out'
    assert run((config, checkpoint), scene, '--out', out) == 0
    # Channels 3, 2 and 0 of bands 6, 5, 4, 3, 2.
    colors = [80, 120, 200]
    assert (cv2.imread(str(out / 'preview.png')) == colors[::-1]).all(2).sum() > 400 * 400
    (entry,) = find_maps([out])
    assert entry.colors == (3, 4, 6)
    with rasterio.open(scene_for_display(entry, lambda share: None)) as shown:
        assert np.abs(shown.read()[:3].mean((1, 2)) - colors).max() < 3
    (entry,) = find_maps([out], bands=[1])
    with rasterio.open(scene_for_display(entry, lambda share: None)) as shown:
        assert np.abs(shown.read()[:3].mean((1, 2)) - 10).max() < 3


def with_pipeline(folder: Path, name: str, extra: str) -> Path:
    (folder / name).mkdir()
    return write_config(folder / name, extra)


OWN_PIPELINE = """
test_dataloader = dict(dataset=dict(
    type='GeoTiffDataset', scenes='x', window=64, metainfo=test_dataloader['dataset']['metainfo'],
    pipeline=[dict(type='LoadGeoTiffWindow'), dict(type='PackSegInputs')]))
model['data_preprocessor']['bgr_to_rgb'] = False
"""


def test_bands_follow_the_loader_that_is_run(
    model: Tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    """The dataset's pipeline counts, not a variable that a base file left; so does color_type.

    So does the window of the dataset, which is what the model was trained on.
    """
    classes = paint(90, 110)
    scene = write_scene(tmp_path / 'field.tif', classes, **UTM)
    for name, extra in (
        ('own', OWN_PIPELINE),
        ('upright', "test_pipeline[0]['color_type'] = 'color_ignore_orientation'\n"),
    ):
        config = with_pipeline(tmp_path, name, extra)
        assert run((config, model[1]), scene, '--out', tmp_path / name / 'out') == 0
        np.testing.assert_array_equal(read(tmp_path / name / 'out' / 'field.tif'), classes)
        said = capsys.readouterr().out
        assert (
            "64x64 pixels (window of the test_dataloader's dataset in the config)" in said
            if name == 'own'
            else '64x64 pixels (crop_size in the config)' in said
        )
    config = with_pipeline(tmp_path, 'file', "test_pipeline[0]['color_type'] = 'unchanged'\n")
    with pytest.raises(PredictError, match='which band comes first depends on the file'):
        run((config, model[1]), scene, '--out', tmp_path / 'out')
    one = with_pipeline(tmp_path, 'one', "model['decode_head'].update(num_classes=1)\n")
    checkpoint = tmp_path / 'one.pth'
    torch.save(
        dict(
            state_dict={
                'decode_head.conv_seg.weight': torch.zeros(1, 3, 1, 1),
                'decode_head.conv_seg.bias': torch.zeros(1),
            }
        ),
        str(checkpoint),
    )
    with pytest.raises(PredictError, match='num_classes=1, but a map also needs a class for'):
        run((one, checkpoint), scene, '--out', tmp_path / 'out')


@pytest.mark.parametrize('orientation', [3, 6])
def test_a_picture_turned_by_its_exif_is_refused(
    model: Tuple[Path, Path], tmp_path: Path, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(COLORS[paint(80, 80)]).save(str(tmp_path / 'a.png'), exif=exif)
    with pytest.raises(PredictError, match='a.png is turned by its EXIF'):
        run(model, tmp_path / 'a.png', '--out', tmp_path / 'out')


def test_the_model_sees_a_scene_in_the_size_it_was_trained_on(
    model: Tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    classes = paint(90, 130)
    scene = write_scene(tmp_path / 'a.tif', classes, **UTM)
    doubled = write_config(
        tmp_path, "test_pipeline.insert(1, dict(type='Resize', scale_factor=2.0, keep_ratio=True))"
    )
    Image.fromarray(COLORS[classes]).save(str(tmp_path / 'b.png'))
    fitted = with_pipeline(
        tmp_path,
        'fitted',
        "test_pipeline.insert(1, dict(type='Resize', scale=(300, 180), keep_ratio=True))",
    )
    for number, (config, source, options, told) in enumerate(
        (
            (doubled, scene, [], '260x180 pixels (scale_factor=2.0'),
            (doubled, scene, ['--scale', '3'], '390x270 pixels (--scale 3)'),
            (
                model[0],
                scene,
                ['--gsd', '0.25'],
                '260x180 pixels (--gsd 0.25, and its pixels have 0.5',
            ),
            (fitted, tmp_path / 'b.png', [], '260x180 pixels (scale=(300, 180)'),
            (fitted, scene, [], 'a.tif (its own size: scale=(300, 180)'),
        )
    ):
        out = tmp_path / f'out{number}'
        assert run((config, model[1]), source, '--out', out, '--confidence', *options) == 0
        np.testing.assert_array_equal(read(out / f'{source.stem}.tif'), classes)
        assert read(out / f'{source.stem}_confidence.tif').shape == classes.shape
        assert told in capsys.readouterr().out
    with pytest.raises(PredictError, match='made with another size'):
        run((doubled, model[1]), scene, '--out', tmp_path / 'out0', '--confidence', '--scale', '1')
    with pytest.raises(PredictError, match='--gsd 0.25 needs .*b.png has no CRS .*--scale'):
        run(model, tmp_path / 'b.png', '--out', tmp_path / 'out9', '--gsd', '0.25')


def test_a_map_knows_its_colors_and_the_sources_of_a_mosaic(
    model: Tuple[Path, Path], tmp_path: Path
) -> None:
    config, checkpoint = model
    source = write_scene(tmp_path / 'a.tif', paint(60, 80), **UTM)
    mosaic = tmp_path / 'm.vrt'
    rasterio.shutil.copy(str(source), str(mosaic), driver='VRT')
    options = [mosaic, '--out', tmp_path / 'out', '--window', 32]
    assert run(model, *options) == run(model, *options) == 0
    before = os.stat(source)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    with pytest.raises(PredictError, match='made with another input'):
        run(model, *options)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    other = write_config(tmp_path, "test_dataloader['dataset']['metainfo']['palette'][0] = [9] * 3")
    with pytest.raises(PredictError, match='made with another palette'):
        run((other, checkpoint), *options)


def test_files_of_others_stay(model: Tuple[Path, Path], tmp_path: Path) -> None:
    scene = write_scene(tmp_path / 'a.tif', paint(80, 90), **UTM)
    other = write_scene(tmp_path / 'b.tif', paint(80, 90), **UTM)
    out = tmp_path / 'out'
    out.mkdir()
    for name, options in (('a.json', ()), ('a.gpkg', ('--polygons',))):
        (out / name).write_text('mine')
        with pytest.raises(PredictError, match=f'{name} exists, and was not made with this map'):
            run(model, scene, '--out', out, *options)
        assert (out / name).read_text() == 'mine'
    (out / 'a.json').unlink()
    assert run(model, scene, '--out', out) == 0 and (out / 'a.gpkg').read_text() == 'mine'
    with pytest.raises(PredictError, match='a.gpkg exists'):
        run(model, scene, '--out', out, '--polygons')
    (out / 'a.gpkg').unlink()
    assert run(model, scene, '--out', out, '--polygons') == 0
    assert (out / 'a.gpkg').read_bytes()[:6] == b'SQLite'
    picture = (out / 'preview.png').read_bytes()
    assert run(model, other, '--out', out) == 0
    assert (out / 'preview.png').read_bytes() == picture and (out / 'b_preview.png').exists()


def test_half_a_georeference(model: Tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    classes = paint(80, 90)
    write_scene(tmp_path / 'world.tif', classes, transform=UTM['transform'])
    write_scene(tmp_path / 'crs.tif', classes, crs=UTM['crs'])
    assert (
        run(
            model,
            tmp_path / 'world.tif',
            tmp_path / 'crs.tif',
            '--out',
            tmp_path / 'out',
            '--polygons',
        )
        == 0
    )
    said = capsys.readouterr().out
    assert 'world.tif has coordinates and no CRS' in said and 'crs.tif has no georeference' in said
    with rasterio.open(str(tmp_path / 'out' / 'world.tif')) as file:
        assert file.crs is None and file.transform == UTM['transform']
    with rasterio.open(str(tmp_path / 'out' / 'crs.tif')) as file:
        assert file.crs is None
    for name in ('world', 'crs'):
        areas = read_polygons(tmp_path / 'out' / f'{name}.gpkg')[1]
        assert np.isnan(areas['area_m2']).all() and areas['area_px'].sum() == 80 * 90
