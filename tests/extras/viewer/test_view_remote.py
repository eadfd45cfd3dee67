"""Folders of somebody else, whose files name servers: none is asked unless the user says so."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, List

import pytest
import rasterio.shutil
from range_server import RangeServer
from support import PATIENT, ROOT
from view_maps import Folders, add_map, folders, open_link
from warm_python import warm_python

from mapsage.extras.viewer import ViewError, ViewSession, find_maps
from mapsage.maps.errors import PredictError
from mapsage.maps.inputs import find_inputs, find_members


@pytest.fixture
def where(tmp_path: Path) -> Folders:
    made = folders(tmp_path)
    add_map(made, 'a', polygons=False)
    return made


def name_scenes(where: Folders, *names: str) -> None:
    (where.maps / 'a.json').write_text(
        json.dumps(
            dict(settings=dict(input=[[name, 1, 1] for name in names], mosaic=len(names) > 1))
        )
    )


def shown(where: Folders, allow_remote: bool = False, *given: Any) -> Any:
    entries = find_maps([where.maps], *given, allow_remote=allow_remote)
    session = ViewSession(entries, allow_remote=allow_remote)
    session.prepare()
    (entry,) = session.as_json(lambda number, kind: kind)['maps']
    return entry


@pytest.mark.parametrize(
    'name',
    [
        '{url}/ok/a.tif',
        '/vsicurl/{url}/ok/a.tif',
        '/vsizip//vsicurl/{url}/ok/a.zip/a.tif',
        '/vsis3/ok/a.tif',
        's3://ok/a.tif',
        'vrt://{url}/ok/a.tif?bands=1',
        'mosaic.vrt',
        'other.tif',
        'http://me:secret@{address}/ok/a.tif?signature=hidden',
    ],
)
def test_a_scene_on_a_server_is_not_asked_for(
    name: str, where: Folders, server: RangeServer
) -> None:
    name = name.format(url=server.url, address=server.address)
    if '/' not in name:  # a mosaic, whatever its name ends in
        path = where.scenes / name
        rasterio.shutil.copy(str(where.scenes / 'a.tif'), str(path), driver='VRT')
        path.write_text(
            path.read_text()
            .replace('a.tif', f'/vsicurl/{server.url}/ok/a.tif')
            .replace('relativeToVRT="1"', 'relativeToVRT="0"')
        )
        name = str(path)
    name_scenes(where, name)
    before = server.requests()
    entry = shown(where)
    note = ' '.join(entry['notes'])
    assert 'scene' not in entry['files'] and '--allow-remote' in note, note
    assert 'a.json names' in note or f'{Path(name).name} names' in note, note
    assert re.search(r'/vsi\w+/|://', note) and 'secret' not in note and 'hidden' not in note, note
    assert server.requests() == before


def test_a_mosaic_of_which_one_scene_lies_on_a_server(where: Folders, server: RangeServer) -> None:
    name_scenes(where, str(where.scenes / 'a.tif'), f'{server.url}/ok/a.tif')
    before = server.requests()
    assert 'a.json names /vsicurl/http' in shown(where)['notes'][0]
    assert server.requests() == before


def test_a_server_is_asked_when_the_user_says_so(
    where: Folders, server: RangeServer, tmp_path: Path
) -> None:
    scene = Path(server._log).parent / 'scene.tif'
    scene.write_bytes((where.scenes / 'a.tif').read_bytes())
    name_scenes(where, f'{server.url}/ok/scene.tif')
    before = len(server.requests())
    entry = shown(where, True)
    assert not entry['notes'] and 'scene' in entry['files']
    assert len(server.requests()) > before


def test_maps_scenes_and_labels_that_name_a_server(where: Folders, server: RangeServer) -> None:
    text = (
        f'<VRTDataset rasterXSize="9" rasterYSize="9"><VRTRasterBand dataType="Byte" band="1">'
        f'<SimpleSource><SourceFilename>{server.url}/ok/a.tif</SourceFilename></SimpleSource>'
        f'</VRTRasterBand></VRTDataset>'
    )
    before = server.requests()
    (where.scenes / 'a.tif').write_text(text)  # the user has named the folder, not this file
    (where.truth / 'a.tif').write_text(text)
    notes = shown(where, False, where.scenes, where.truth)['notes']
    assert len(notes) == 2 and all('a.tif names http' in note for note in notes)
    (where.maps / 'b.tif').write_text(text)
    with pytest.raises(ViewError, match=r'b\.tif names http.*--allow-remote'):
        find_maps([where.maps])
    assert server.requests() == before


def test_predict_asks_for_what_the_command_names(where: Folders, server: RangeServer) -> None:
    mosaic = where.scenes / 'm.vrt'
    mosaic.write_text(
        f'<VRTDataset><SourceFilename>{server.url}/ok/a.tif</SourceFilename></VRTDataset>'
    )
    url = f'{server.url}/ok/a.tif'
    before = server.requests()
    for find in (find_inputs, find_members):
        names: List[str] = [str(where.scenes)]
        with pytest.raises(PredictError, match=r'm\.vrt names http.*name the file itself'):
            find(names)
        assert len(find(names, True)) == 2
        assert len(find([str(mosaic), url])) == 2
    assert server.requests() == before


def test_the_command_asks_no_server(where: Folders, server: RangeServer) -> None:
    """Nor for what lies next to a file that holds nothing but pixels."""
    for suffix in ('', '_confidence'):
        Path(f'{where.maps}/a{suffix}.tif.aux.xml').write_text(
            '<PAMDataset><Metadata domain="OVERVIEWS"><MDI key="OVERVIEW_FILE">/vsicurl/'
            f'{server.url}/ok/o.tif</MDI></Metadata></PAMDataset>'
        )
    name_scenes(where, f'{server.url}/ok/a.tif')
    before = server.requests()
    process = subprocess.Popen(
        [warm_python(), 'tools/view.py', str(where.maps)],
        cwd=str(ROOT),
        stdout=subprocess.PIPE,
        universal_newlines=True,
        env=dict(os.environ),
    )
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if 'The scene is not shown' in line:
                break
        (link,) = re.findall(r'http://127.0.0.1:\d+/\S+', lines[0])
        assert open_link(link)
        assert 'The next one: http://127.0.0.1' in process.stdout.readline()
        assert 'a.json names' in lines[-1] and '--allow-remote' in lines[-1]
    finally:
        process.kill()
        process.communicate(timeout=PATIENT)
    assert server.requests() == before
