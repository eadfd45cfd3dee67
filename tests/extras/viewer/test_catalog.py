"""Which files are maps, and what belongs to each."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from view_maps import NOWHERE, TURNED, add_map, folders, name_scene, write_raster

from mapsage.extras.viewer import ViewError, find_maps
from mapsage.extras.viewer.polygons import polygons_in


def test_a_map_is_found_with_what_belongs_to_it(tmp_path: Path) -> None:
    where = folders(tmp_path)
    labels = add_map(where, '影像')
    add_map(where, 'b', polygons=False, confidence=False)
    first, second = find_maps([where.maps], where.scenes, where.truth)
    assert (first.name, second.name) == ('b', '影像')  # no confidence file among them
    assert first.confidence is None and first.polygons is None
    assert second.confidence is not None and second.polygons is not None
    assert second.scenes == [str(where.scenes / '影像.tif')]
    assert second.truth == where.truth / '影像.tif'
    told = second.as_json()
    shares = [np.mean(labels[labels != 255] == value) for value in range(6)]
    assert [each['share'] for each in told['classes']] == pytest.approx(shares)
    assert told['crs'] == 'EPSG:32631' and told['pixel_meters'] == pytest.approx(0.5, rel=1e-3)
    assert not told['notes']


def test_the_report_names_scene_and_pixels(tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a', classes=2)
    scene = where.scenes / 'a.tif'
    name_scene(where, 'a', scene, (600, 400), {'class 0': 3, 'class 1': 1})
    (entry,) = find_maps([where.maps / 'a.tif'])
    assert entry.scenes == [str(scene)] and entry.pixels == {0: 3, 1: 1}
    report = json.loads((where.maps / 'a.json').read_text())
    # Of a stranger or of an earlier version: the first bands are shown.
    for colors, bands in (([4, 3, 2], (4, 3, 2)), ([2], (2,)), ([0, 1, 2], ()), ('321', ())):
        (where.maps / 'a.json').write_text(json.dumps(dict(report, colors=colors)))
        assert find_maps([where.maps])[0].colors == bands
    scene.unlink()
    (entry,) = find_maps([where.maps])
    assert not entry.scenes and '--scenes' in entry.notes[0]
    (where.maps / 'a.json').write_text('{')  # a report that was cut off
    assert find_maps([where.maps])[0].pixels != {0: 3, 1: 1}


@pytest.mark.parametrize('place', [NOWHERE, TURNED])
def test_a_map_anywhere(place: dict, tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a', polygons=False, **place)
    told = find_maps([where.maps])[0].as_json()
    assert (told['crs'] is None) == (told['meters_per_unit'] is None) == (place is NOWHERE)


def test_what_cannot_be_shown_is_said(tmp_path: Path) -> None:
    where = folders(tmp_path)
    with pytest.raises(ViewError, match='no map in .*no .tif file.*predict'):
        find_maps([where.maps])
    write_raster(where.maps / 'scene.tif', np.zeros((3, 20, 20), np.uint8), None, None)
    with pytest.raises(ViewError, match=r'found scene\.tif'):
        find_maps([where.maps])
    with pytest.raises(ViewError, match='gone does not exist'):
        find_maps([tmp_path / 'gone'])
    add_map(where, 'a')
    with pytest.raises(ViewError, match='--truth .*no file there has the name of a map.*a'):
        find_maps([where.maps], truth=where.maps.parent / 'scenes' / '..')
    with pytest.raises(ViewError, match='--scenes .* does not exist'):
        find_maps([where.maps], tmp_path / 'gone')


def test_polygons_of_a_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = folders(tmp_path)
    add_map(where, 'a')
    path = where.maps / 'a.gpkg'
    everything = polygons_in(path, [-1e9, -1e9, 1e9, 1e9])
    some = polygons_in(path, [300001, 3399978, 300002, 3399979])  # within one tile of 25 m
    assert len(everything['features']) == 96 > len(some['features']) == 1
    (found,) = some['features']
    assert found['properties'] == dict(
        class_id=0, class_name='class 0', area_m2=pytest.approx((50 * 50 - 20 * 40) / 4, rel=0.01)
    )
    monkeypatch.setattr('mapsage.extras.viewer.polygons.MOST', 95)
    assert polygons_in(path, [-1e9, -1e9, 1e9, 1e9]) == dict(
        type='FeatureCollection', features=[], too_many=95
    )
