"""mapsage embed: known vectors in the right place, however the work is divided, and bad inputs."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
import rasterio
import torch
from embedding_runs import run, write_config
from geo_scenes import UTM, write_raster
from mmengine.registry import DefaultScope
from mmseg.registry import MODELS
from stack_files import SENSORS, write_model, write_place
from support import ROOT, Launch, check_finished, main_leg, rest_is_long

from mapsage.engine.env_cfg import ConfigError
from mapsage.extras.embeddings import read_embeddings
from mapsage.extras.embeddings.embedding_maps import choose_overlap
from mapsage.extras.embeddings.errors import EmbeddingError
from mapsage.geo.passport import VERSION
from mapsage.maps.errors import PredictError
from mapsage.maps.strips import key_of

pytestmark = main_leg


def draw(height: int, width: int, bands: int = 3, seed: int = 0) -> np.ndarray:
    """Return (bands, height, width) uint8 of noise with structure of 4 pixels."""
    random = np.random.RandomState(seed)
    coarse = random.randint(1, 200, (bands, height // 4 + 1, width // 4 + 1))
    smooth = coarse.repeat(4, 1).repeat(4, 2)[:, :height, :width]
    return (smooth + random.randint(0, 55, smooth.shape)).astype(np.uint8)


def block_means(image: np.ndarray, side: int) -> np.ndarray:
    """Return (bands, h, w) unit vectors of the means of blocks; parts of blocks are mirrored."""
    bands, height, width = image.shape
    padding = (0, 0), (0, -height % side), (0, -width % side)
    padded = np.pad(image.astype(np.float64), padding, mode='reflect')
    h, w = padded.shape[1] // side, padded.shape[2] // side
    means = padded.reshape(bands, h, side, w, side).mean((2, 4))
    return means / np.linalg.norm(means, axis=0)


@pytest.mark.parametrize('size', [(203, 317), (64, 64), (30, 40), (300, 30)])
def test_every_vector_is_where_it_belongs(tmp_path: Path, size: Any) -> None:
    image = draw(*size)
    scene = write_raster(tmp_path / 'a.tif', image)
    assert run(write_config(tmp_path), scene, '--out', tmp_path / 'out') == 0
    written = read_embeddings(tmp_path / 'out/a.tif')
    np.testing.assert_allclose(written, block_means(image, 4), atol=0.012)
    with rasterio.open(tmp_path / 'out/a.tif') as file:
        assert file.transform == UTM['transform'] * UTM['transform'].scale(4)
        assert file.crs == UTM['crs']
    report = json.loads((tmp_path / 'out/a.json').read_text())
    assert report['cells'] == written[0].size and report['files'] == ['a.tif']
    assert not list((tmp_path / 'out').glob('.*'))
    if max(size) > 100:
        # Nothing but rounding makes borders of windows different.
        assert abs(report['seam_index'] - 1) < 0.05


def test_levels_of_the_encoder(tmp_path: Path) -> None:
    image, config = draw(80, 120), write_config(tmp_path)
    scene = write_raster(tmp_path / 'a.tif', image)
    coarse, fine = block_means(image, 8), block_means(image, 4)
    run(config, scene, '--out', tmp_path / '0', '--layer', 'backbone:0')
    np.testing.assert_allclose(read_embeddings(tmp_path / '0/a.tif'), coarse, atol=0.012)
    run(config, scene, '--out', tmp_path / 'all', '--layer', 'backbone:all')
    both = read_embeddings(tmp_path / 'all/a.tif')
    # Both levels have the same length.
    np.testing.assert_allclose(both[3:], fine / np.sqrt(2), atol=0.012)
    np.testing.assert_allclose(np.linalg.norm(both[:3], axis=0), np.sqrt(0.5), atol=0.01)
    run(config, scene, '--out', tmp_path / 'head', '--layer', 'decode_head')
    np.testing.assert_array_equal(read_embeddings(tmp_path / 'head/a.tif')[0].shape, (10, 15))
    for layer, text in (
        ('backbone:2', r'gives 2 level\(s\), expected a number of 0 to 1'),
        ('backbone:x', 'expected MODULE, MODULE:all or MODULE:NUMBER'),
        ('head', "no module 'head'; it has data_preprocessor, backbone, decode_head"),
    ):
        with pytest.raises(EmbeddingError, match=text):
            run(config, scene, '--out', tmp_path / 'x', '--layer', layer)


def test_a_single_window_is_what_the_encoder_gives(tmp_path: Path) -> None:
    """Without neighbors and margin, the file holds the features of MMSegmentation's own model."""
    image = draw(64, 64)
    scene, config = write_raster(tmp_path / 'a.tif', image), write_config(tmp_path, 'Padded')
    run(config, scene, '--out', tmp_path, '--margin', 0, '--out', tmp_path / 'out')
    torch.manual_seed(0)
    # Other tests of the process may have left another scope.
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = MODELS.build(dict(type='Padded'))
    model.init_weights()
    with torch.no_grad():
        (features,) = model(torch.from_numpy(image[None].astype(np.float32) / 255))
    vectors = torch.nn.functional.normalize(features, dim=1)[0].numpy()
    np.testing.assert_allclose(read_embeddings(tmp_path / 'out/a.tif'), vectors, atol=0.012)


def test_margins_and_blending_hide_the_zeros_around_windows(tmp_path: Path, capsys: Any) -> None:
    """With context, the vectors are those of one large window."""
    image, config = draw(256, 256), write_config(tmp_path, 'Padded')
    scene = write_raster(tmp_path / 'a.tif', image)

    def seam(name: str, *options: Any) -> float:
        run(config, scene, '--out', tmp_path / name, *options)
        return json.loads((tmp_path / name / 'a.json').read_text())['seam_index']

    whole = ['--window', 256, '--margin', 0]
    assert seam('whole', *whole) is None
    bare = seam('bare', '--margin', 0, '--overlap', 0)
    assert 'borders of windows show' in capsys.readouterr().out
    good = seam('good', '--margin', 16)
    assert good < 1.05 < bare
    expected, written = (read_embeddings(tmp_path / name / 'a.tif') for name in ('whole', 'good'))
    inner = np.s_[:, 8:-8, 8:-8]
    np.testing.assert_allclose(written[inner], expected[inner], atol=0.012)


def test_upsampled_to_the_pixel(tmp_path: Path) -> None:
    image, config = draw(100, 90), write_config(tmp_path)
    scene = write_raster(tmp_path / 'a.tif', image)
    run(config, scene, '--out', tmp_path / 'out', '--upsample')
    written = read_embeddings(tmp_path / 'out/a.tif')
    assert written.shape == (3, 100, 90)
    with rasterio.open(tmp_path / 'out/a.tif') as file:
        assert file.transform == UTM['transform']
    cells = torch.from_numpy(block_means(image, 4))[None]
    smooth = torch.nn.functional.interpolate(cells, scale_factor=4, mode='bilinear')[0].numpy()
    smooth = smooth / np.linalg.norm(smooth, axis=0)
    np.testing.assert_allclose(
        written[:, 4:-8, 4:-8], smooth[:, 4 : 100 - 8, 4 : 90 - 8], atol=0.03
    )
    report = json.loads((tmp_path / 'out/a.json').read_text())
    assert report['seam_index'] < 1.05


def test_cells_without_data(tmp_path: Path) -> None:
    image = draw(64, 128)
    # 10 of 16 pixels of one cell, half of another, and all of eight by eight cells.
    image[:, :2, :4] = image[:, 2, :2] = 0
    image[:, 8:10, 8:12] = image[:, 32:, 64:96] = 0
    scene = write_raster(tmp_path / 'a.tif', image, nodata=0)
    run(write_config(tmp_path), scene, '--out', tmp_path / 'out')
    missing = np.isnan(read_embeddings(tmp_path / 'out/a.tif')[0])
    assert missing[0, 0] and not missing[2, 2] and missing[8:, 16:24].all()
    assert missing.sum() == 1 + 64


def test_principal_components_are_shared(tmp_path: Path, capsys: Any) -> None:
    config = write_config(tmp_path, 'Padded')
    first = write_raster(tmp_path / 'a.tif', draw(150, 150))
    second = write_raster(tmp_path / 'b.tif', draw(100, 150, seed=1))
    run(config, first, '--out', tmp_path / 'one', '--dims', 6)
    said = capsys.readouterr().out
    assert '6 principal components of 2,304 vectors of 9 random windows' in said
    # The same folder takes them over, another one by --pca, from either file.
    run(config, first, second, '--out', tmp_path / 'one', '--dims', 6)
    assert 'skipped' in capsys.readouterr().out
    run(config, second, '--out', tmp_path / 'two', '--pca', tmp_path / 'one/pca.json')
    run(config, second, '--out', tmp_path / 'three', '--pca', tmp_path / 'one/a.tif')
    expected = (tmp_path / 'one/b.tif').read_bytes()
    assert (tmp_path / 'two/b.tif').read_bytes() == expected
    assert (tmp_path / 'three/b.tif').read_bytes() == expected
    tag = json.loads(rasterio.open(tmp_path / 'one/b.tif').tags()['MAPSAGE_EMBEDDING'])
    assert tag['pca']['dims'] == 6 and tag['identity']['pca'] and tag['unit_length']
    # The vectors are those of all components, projected.
    run(config, second, '--out', tmp_path / 'all')
    from mapsage.extras.embeddings.vectors import Pca, to_unit

    pca = Pca.from_dict(tag['pca'], '')
    full = read_embeddings(tmp_path / 'all/b.tif')
    projected = np.einsum('chw,cd->dhw', full, pca.components)
    cosine = (to_unit(projected) * read_embeddings(tmp_path / 'two/b.tif')).sum(0)
    assert np.median(cosine) > 0.98
    for options, text in (
        (['--dims', 5], '6 components, --dims 5 was asked for'),
        (['--dims', 6, '--layer', 'backbone:0'], r'another encoder \(layer differ'),
        (['--pca', tmp_path / 'all/b.tif'], 'holds no principal components; make it with --dims'),
        (['--pca', tmp_path / 'none.json'], 'none.json cannot be read'),
    ):
        with pytest.raises(EmbeddingError, match=text):
            run(config, second, '--out', tmp_path / 'one', *options)


def hidden(folder: Path) -> List[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith('.')]


def start(config: Path, *arguments: Any, ranks: int = 0, **environ: str) -> Launch:
    program = ['bash', 'scripts/embed.sh'] if ranks else [sys.executable, 'tools/embed.py']
    return Launch(
        config,
        *arguments,
        ranks=ranks or 1,
        command=program,
        environ=dict(PYTHONPATH=str(ROOT / 'tests'), ACCELERATOR='cpu', **environ),
    )


OPTIONS = ['--dims', 6, '--margin', 8, '--batch-size', 3]


@pytest.fixture(scope='module')
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A config, its scenes, and the folder that one process made of them."""
    folder = tmp_path_factory.mktemp('alone')
    config = write_config(folder, 'Padded')
    image = draw(500, 170)
    image[:, 100:180, 20:90] = 0
    scenes = [
        write_raster(folder / 'a.tif', image, nodata=0),
        write_raster(folder / 'b.tif', draw(400, 64, seed=1)),
    ]
    check_finished(start(config, *scenes, '--out', folder / 'out', *OPTIONS).finish())
    return config, scenes, folder / 'out'


@pytest.mark.parametrize('ranks', rest_is_long([2, 3], 3))
def test_ranks_give_the_same_bytes(alone: Any, tmp_path: Path, ranks: int) -> None:
    config, scenes, expected = alone
    finished = start(config, *scenes, '--out', tmp_path / 'o', *OPTIONS, ranks=ranks).finish()
    check_finished(finished)
    for name in ('a.tif', 'b.tif', 'a.json', 'b.json', 'pca.json'):
        assert (tmp_path / 'o' / name).read_bytes() == (expected / name).read_bytes(), name
    assert f'on {ranks} rank(s)' in finished.output and hidden(tmp_path / 'o') == []


@pytest.mark.long
def test_two_jobs_killed_and_one_started_again_give_the_same_bytes(
    alone: Any, tmp_path: Path
) -> None:
    config, scenes, expected = alone
    out = tmp_path / 'o'

    def job(number: int, seconds: str) -> Launch:
        shard = ['--shard', f'{number}/2']
        return start(config, *scenes, '--out', out, *OPTIONS, *shard, PADDED_SECONDS=seconds)

    slow = [job(number, '1') for number in range(2)]
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (
        len(list(out.glob('.ledger/plan-*'))) < 2
        or not list(out.glob('.a.*/strip*'))
        or not list(out.glob('.b.*/strip*'))
    ):
        for launch in slow:
            assert launch.process.poll() is None, launch.finish().output
        time.sleep(0.05)
    # Each began with a scene of its own.
    assert sorted(path.name[1] for path in out.glob('.?.*')) == ['a', 'b']
    for launch in slow:
        launch.process.send_signal(signal.SIGKILL)
    for launch in slow:
        launch.finish()
    assert list(out.glob('.a.*/strip*')) and not (out / 'a.tif').exists()
    finished = job(1, '0').finish()
    check_finished(finished)
    assert 'strips are finished' in finished.output
    for name in ('a.tif', 'b.tif', 'a.json', 'b.json', 'pca.json'):
        assert (out / name).read_bytes() == (expected / name).read_bytes(), name


def test_it_says_before_the_start_what_it_takes(tmp_path: Path, capsys: Any) -> None:
    scene = write_raster(tmp_path / 'a.tif', draw(203, 317))
    config = write_config(tmp_path, 'Padded')
    run(config, scene, '--out', tmp_path / 'out')
    said = capsys.readouterr().out
    assert 'the weights of Padded are random (seed 0)' in said
    assert '4,080 vectors of 16 components, one every 4 pixel(s): 0.1 MB' in said
    assert 'windows, about 0.' in said and 'MB of memory a rank' in said
    assert 'seam index' in said
    run(config, scene, '--out', tmp_path / 'out')
    assert 'is there, made with the same settings: skipped' in capsys.readouterr().out
    with pytest.raises(PredictError, match='was made with another .*margin'):
        run(config, scene, '--out', tmp_path / 'out', '--margin', 4)
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine/a.tif').write_text('of somebody else')
    with pytest.raises(PredictError, match='exists, and was not made with this map'):
        run(config, scene, '--out', tmp_path / 'mine')
    with pytest.raises(EmbeddingError, match='would overwrite its input'):
        run(config, scene, '--out', tmp_path, '--overwrite')


def test_weights_are_part_of_the_identity(tmp_path: Path) -> None:
    config, scene = write_config(tmp_path, 'Padded'), write_raster(tmp_path / 'a.tif', draw(64, 64))
    torch.manual_seed(5)
    with torch.no_grad():
        from mmengine.config import Config

        from mapsage.commands.cli import build_model

        state = build_model(Config.fromfile(str(config))).state_dict()
    torch.save(dict(state_dict=state, meta={}), tmp_path / 'w.pth')
    head = {name: value + 1 * name.startswith('decode_head') for name, value in state.items()}
    torch.save(dict(state_dict=head, meta={}), tmp_path / 'head.pth')
    passport = dict(version=VERSION, parts={}, classes={})
    meta = dict(data=dict(passport=passport))
    torch.save(dict(state_dict=state, meta=meta), tmp_path / 'passport.pth')
    identities = []
    for number, weights in enumerate(
        ([], *([tmp_path / f'{name}.pth'] for name in ('w', 'head', 'passport')))
    ):
        out = tmp_path / str(number)
        run(config, *weights, scene, '--out', out)
        tag = rasterio.open(out / 'a.tif').tags()['MAPSAGE_EMBEDDING']
        identities.append(json.loads(tag)['identity'])
    # A head does not change the vectors of a backbone.
    assert identities[0] != identities[1] == identities[2]
    assert identities[3] == dict(identities[1], passport=key_of(passport))
    with pytest.raises(SystemExit):
        run(config, tmp_path / 'w.pth', '--out', tmp_path / 'x')


@pytest.mark.parametrize(
    'bands, options, text',
    [
        (2, [], r'2 band\(s\) .* the model takes 3'),
        (2000, [], 'the model takes 3'),
        (3, ['--window', 65], 'no whole stride: give --window a multiple'),
        (3, ['--margin', 32], 'expected multiples of 4, a margin of 0 to 28'),
        (3, ['--margin', 3], 'expected multiples of 4'),
        (3, ['--dims', 9], 'vectors of 3 components'),
    ],
)
def test_bad_inputs_end_before_anything_is_written(
    tmp_path: Path, bands: int, options: List[Any], text: str
) -> None:
    scene = write_raster(tmp_path / 'a.tif', draw(80, 80, bands), photometric='minisblack')
    with pytest.raises((EmbeddingError, PredictError), match=text):
        run(write_config(tmp_path), scene, '--out', tmp_path / 'out', *options)
    assert list((tmp_path / 'out').iterdir()) == []


def test_scenes_without_data_and_features_that_are_no_numbers(tmp_path: Path, capsys: Any) -> None:
    config = write_config(tmp_path)
    empty = write_raster(tmp_path / 'empty.tif', np.zeros((3, 70, 80), np.uint8), nodata=0)
    with pytest.raises(EmbeddingError, match='no pixel of the 1 input.s. has data'):
        run(config, empty, '--out', tmp_path / 'out')
    scene = write_raster(tmp_path / 'a.tif', draw(64, 64))
    run(config, empty, scene, '--out', tmp_path / 'out')
    assert 'empty.tif has no data anywhere' in capsys.readouterr().out
    assert np.isnan(read_embeddings(tmp_path / 'out/empty.tif')).all()
    with pytest.raises(EmbeddingError, match='features that are not finite numbers'):
        run(write_config(tmp_path, 'NotFinite'), scene, '--out', tmp_path / 'nan')


def test_a_config_without_an_encoder(tmp_path: Path) -> None:
    scene = write_raster(tmp_path / 'a.tif', draw(64, 64))
    bare = tmp_path / 'bare.py'
    bare.write_text(
        "custom_imports = dict(imports=['mapsage', 'embedding_runs'])\n"
        "default_scope = 'mmseg'\nmodel = dict(type='Padded')\n"
    )
    with pytest.raises(EmbeddingError, match='a Padded without backbone and data_preprocessor'):
        run(bare, scene, '--out', tmp_path / 'out')
    bare.write_text("default_scope = 'mmseg'\n")
    with pytest.raises(ConfigError, match="the config's model must be a dict"):
        run(bare, scene, '--out', tmp_path / 'out')


def test_margins_and_overlaps_by_default() -> None:
    assert choose_overlap((512, 512), 16, None, None) == (64, 96)
    assert choose_overlap((128, 128), 32, None, None) == (32, 32)
    assert choose_overlap((64, 64), 64, None, None) == (0, 0)
    assert choose_overlap((224, 224), 14, 28, 0) == (28, 0)


def test_places_of_several_sensors(tmp_path: Path, capsys: Any) -> None:
    """A stack is one input; the neck pools its dates, and a place without data has no vectors."""
    write_place(tmp_path, 'a', 0)
    write_place(tmp_path, 'b', 1)
    for path in tmp_path.glob('s?/b_*.tif'):
        with rasterio.open(path, 'r+') as file:
            file.nodata = 0
            file.write(np.zeros((file.count, file.height, file.width), file.dtypes[0]))
    config = write_model(tmp_path, SENSORS)
    run(config, tmp_path, '--out', tmp_path / 'out', '--layer', 'neck', '--margin', 4)
    said = capsys.readouterr().out
    vectors = read_embeddings(tmp_path / 'out/a.tif')
    assert vectors.shape[0] == 16 and np.isfinite(vectors).all()
    assert 'b.tif has no data anywhere' in said
    with pytest.raises(PredictError, match='--gsd: the model takes scene stacks'):
        run(config, tmp_path, '--out', tmp_path / 'x', '--gsd', 3)
    with pytest.raises((EmbeddingError, PredictError), match='exist'):
        run(config, tmp_path / 'none', '--out', tmp_path / 'x')
