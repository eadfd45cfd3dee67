"""Scenes from a bucket and maps into it, with a server that is slow, busy, or cuts its answers."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import pytest
import rasterio
from rasterio.transform import from_origin
from support import ROOT, Finished, launch, main_leg, write_tiny_config
from warm_python import warm_python

pytestmark = main_leg

# A request that must fail does so soon.
PATIENCE = dict(GDAL_HTTP_MAX_RETRY='3', GDAL_HTTP_RETRY_DELAY='0.1', GDAL_HTTP_TIMEOUT='10')
NAMES = ('a', 'b')


@pytest.fixture(scope='module')
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('scenes')
    random = np.random.RandomState(0)
    for number, name in enumerate(NAMES):
        profile = dict(
            driver='GTiff', width=150, height=150, count=3, dtype='uint8', crs='EPSG:32633'
        )
        transform = from_origin(400000 + 150 * number, 5800000, 1, 1)
        with rasterio.open(
            str(folder / f'{name}.tif'), 'w', transform=transform, **profile
        ) as file:
            file.write(random.randint(0, 255, (3, 150, 150)).astype(np.uint8))
    return folder


@pytest.fixture(scope='module')
def server(tmp_path_factory: pytest.TempPathFactory, scenes: Path) -> Iterator[Any]:
    pytest.importorskip('moto', reason='needs moto: bash scripts/run_tests.sh --leg engines')
    from s3_server import S3Server

    server = S3Server(tmp_path_factory.mktemp('s3'))
    try:
        server.client().create_bucket(Bucket='maps')
        for path in scenes.glob('*.tif'):
            server.client().upload_file(str(path), 'maps', f'scenes/{path.name}')
        yield server
    finally:
        server.close()


@pytest.fixture(scope='module')
def local_maps(
    tmp_path_factory: pytest.TempPathFactory, scenes: Path, model: Tuple[Path, Path]
) -> Dict[str, str]:
    """Digests of the maps that are made without a server."""
    folder = tmp_path_factory.mktemp('local')
    finished = predict(model, folder, scenes, folder / 'maps', {})
    assert finished.status == 0, finished.output[-3000:]
    return digests((folder / 'maps').glob('*.tif'))


def predict(
    model: Tuple[Path, Path],
    folder: Path,
    scenes: Any,
    out: Any,
    environ: Dict[str, str],
    *options: str,
) -> Finished:
    """Run tools/predict.py in a folder."""
    return launch(
        *['-c', f'cd {folder} && exec "$@"', 'predict', warm_python(), ROOT / 'tools/predict.py'],
        *[*model, scenes, '--out', out, '--accelerator', 'cpu', *options],
        command=['bash'],
        environ={**PATIENCE, 'PYTHONPATH': str(ROOT / 'tests'), **environ},
    )


def digests(paths: Any) -> Dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def objects(server: Any, prefix: str) -> Dict[str, bytes]:
    """Return the objects below a prefix by their names."""
    client = server.client()
    listing = client.list_objects_v2(Bucket='maps', Prefix=prefix).get('Contents', [])
    return {
        entry['Key'][len(prefix) :]: client.get_object(Bucket='maps', Key=entry['Key'])[
            'Body'
        ].read()
        for entry in listing
    }


@pytest.mark.parametrize('fault', ['', 'slow', 'busy'])
def test_maps_of_a_bucket_in_a_bucket(
    fault: str, server: Any, model: Tuple[Path, Path], local_maps: Dict[str, str], tmp_path: Path
) -> None:
    server.set_fault(fault)
    prefix = f'maps{fault}/'
    finished = predict(model, tmp_path, 's3://maps/scenes/', f's3://maps/{prefix}', server.environ)
    assert finished.status == 0, finished.output[-3000:]
    stored = objects(server, prefix)
    assert {
        name: hashlib.sha256(content).hexdigest()
        for name, content in stored.items()
        if name.endswith('.tif')
    } == local_maps
    assert {'a.json', 'b.json', 'a_preview.png'} <= set(stored)
    assert digests((tmp_path / f's3-maps-maps{fault}').glob('*.tif')) == local_maps


@pytest.mark.parametrize('ranks, options', [(2, []), (2, ['--allow-remote']), (1, [])])
def test_ranks_read_a_bucket(
    ranks: int,
    options: List[str],
    server: Any,
    model: Tuple[Path, Path],
    local_maps: Dict[str, str],
    tmp_path: Path,
) -> None:
    """By its folder on two ranks, and object by object."""
    server.set_fault('')
    names = (
        ['s3://maps/scenes/'] if ranks > 1 else [f's3://maps/scenes/{name}.tif' for name in NAMES]
    )
    finished = launch(
        *[*model, *names, '--out', tmp_path, *options],
        ranks=ranks,
        command=['bash', 'scripts/predict.sh'],
        environ={
            'ACCELERATOR': 'cpu',
            'PYTHONPATH': str(ROOT / 'tests'),
            **PATIENCE,
            **server.environ,
        },
    )
    assert finished.status == 0, finished.output[-3000:]
    assert digests(tmp_path.glob('*.tif')) == local_maps


def test_checkpoints_are_not_saved_in_a_bucket(
    server: Any, tiny_data: Path, tmp_path: Path
) -> None:
    out = "default_hooks['checkpoint'].update(out_dir='s3://maps/runs', interval=1)\n"
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, out)
    finished = launch(config, '--work-dir', tmp_path / 'work', environ=server.environ)
    assert finished.status == 1
    assert 'Please install petrel_client' in finished.output[-2000:], finished.output[-3000:]


def test_a_second_run_continues_with_what_the_bucket_lacks(
    server: Any, model: Tuple[Path, Path], local_maps: Dict[str, str], tmp_path: Path
) -> None:
    server.set_fault('')
    arguments = (model, tmp_path, 's3://maps/scenes/', 's3://maps/resumed', server.environ)
    assert predict(*arguments).status == 0
    server.client().delete_object(Bucket='maps', Key='resumed/b.json')
    # The first map is complete in the bucket and has no local copy; the second is the reverse.
    for path in (tmp_path / 's3-maps-resumed').glob('a*'):
        path.unlink()
    finished = predict(*arguments)
    assert finished.status == 0, finished.output[-3000:]
    assert finished.output.count('made with the same settings: skipped') == 2
    assert 'predicting: ' not in finished.output
    assert {'a.json', 'b.json', 'b.tif'} <= set(objects(server, 'resumed/'))
    # Another model's settings are not mixed in.
    finished = predict(*arguments, '--overlap', '8')
    assert finished.status == 1 and 'was made with another overlap' in finished.output


@pytest.mark.parametrize(
    'fault, out, words',
    [
        ('read-only', 's3://maps/refused/', ['--out s3://maps/refused/ cannot be written']),
        ('', 's3://no-bucket/refused/', ['--out s3://no-bucket/refused/ cannot be written']),
        ('', 'https://example.invalid/maps/', ['expected a folder of this machine']),
        ('cut', 's3://maps/cut/', ['scenes/']),
    ],
)
def test_refusals(
    fault: str,
    out: str,
    words: List[str],
    server: Any,
    model: Tuple[Path, Path],
    tmp_path: Path,
) -> None:
    server.set_fault(fault)
    finished = predict(model, tmp_path, 's3://maps/scenes/', out, server.environ)
    assert finished.status != 0 and 'predicting: 9' not in finished.output
    assert all(word in finished.output for word in words), finished.output[-3000:]
    assert 'Traceback' not in finished.output
    assert objects(server, 'cut/').keys() <= {'a.tif'}


def test_a_mosaic_of_the_bucket_names_no_other_server(
    server: Any, model: Tuple[Path, Path], scenes: Path, tmp_path: Path
) -> None:
    server.set_fault('')
    source = '<VRTDataset><SourceFilename>{}</SourceFilename></VRTDataset>'
    for folder, name in (
        ('same', '/vsis3/maps/same/a.tif'),
        ('other', 'http://example.invalid/a.tif'),
    ):
        server.client().put_object(
            Bucket='maps', Key=f'{folder}/m.tif', Body=source.format(name).encode()
        )
        server.client().upload_file(str(scenes / 'a.tif'), 'maps', f'{folder}/a.tif')
    from mapsage.geo import as_vsi, files_of, server_in

    old = dict(os.environ)
    os.environ.update(server.environ)
    try:
        found = {
            folder: {
                file.rsplit('/', 1)[1]: server_in(file, as_vsi(f's3://maps/{folder}/'))
                for file in files_of(f's3://maps/{folder}/', ['.tif'])
            }
            for folder in ('same', 'other')
        }
    finally:
        os.environ.clear()
        os.environ.update(old)
    assert found == {
        'same': {'a.tif': '', 'm.tif': ''},
        'other': {'a.tif': '', 'm.tif': 'http://example.invalid/a.tif'},
    }
