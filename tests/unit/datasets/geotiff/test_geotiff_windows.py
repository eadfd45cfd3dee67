"""Windows at random places of scenes, drawn by the classes of their labels."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
from geo_scenes import CLASSES, PIXELS, count_open_files, paint, write_raster
from geotiff_data import PIPELINE, build_dataset, load_window, write_scene
from mmengine.dataset import ConcatDataset, RepeatDataset
from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope
from torch.utils.data import DataLoader

from mapsage.datasets.geotiff import windows
from mapsage.engine.loading.block_loader import as_rank
from mapsage.engine.loading.build import build_keyed_loader, set_test_mode
from mapsage.extras.streaming.cache.keys import sample_hashes
from mapsage.geo import GeoError, write_polygons


def random_dataset(
    root: Path,
    balance: Any = None,
    per_epoch: int = 1000,
    redraw: bool = True,
    seed: int = 0,
    **arguments: Any,
) -> Any:
    return build_dataset(
        root,
        windows=dict(type='random', balance=balance, per_epoch=per_epoch, redraw=redraw, seed=seed),
        **{'window': 40, **arguments},
    )


def write_rare(root: Path, name: str = 'a', **profile: Any) -> np.ndarray:
    """Write a scene of which houses, four of 5 x 5 pixels, are 0.1 %; return its classes."""
    classes = np.zeros((250, 400), np.uint8)
    classes[:, :100] = 2
    for row, column in ((30, 40), (31, 390), (200, 220), (245, 150)):
        classes[row : row + 5, column : column + 5] = 1
    write_raster(root / f'scenes/{name}.tif', paint(classes), **profile)
    write_raster(root / f'labels/{name}.tif', classes, **profile)
    return classes


def seen_classes(dataset: Any) -> np.ndarray:
    """Return which classes each window of an epoch shows, bool (windows, classes)."""
    np.random.seed(1)
    found = []
    for index in range(len(dataset)):
        labels = load_window(dataset, index)[1]
        assert (labels != 255).any()
        found.append([(labels == number).any() for number in range(3)])
    return np.array(found)


@pytest.mark.parametrize('kind', ['raster', 'polygons'])
def test_a_rare_class_comes_up_in_its_share(tmp_path: Path, kind: str) -> None:
    classes = write_rare(tmp_path)
    assert (classes == 1).mean() == 0.001
    labels = 'labels'
    if kind == 'polygons':
        labels = 'map.gpkg'
        write_polygons(
            tmp_path / 'labels/a.tif', tmp_path / labels, CLASSES, background=0, simplify=0
        )

    def share_of_windows(balance: Any) -> float:
        draw = random_dataset(tmp_path, balance, labels=labels).random_windows.draw
        places = [draw(random)[1:] for random in [np.random.RandomState(1)] for _ in range(1000)]
        return float(
            np.mean(
                [
                    (classes[row : row + 40, column : column + 40] == 1).any()
                    for column, row in places
                ]
            )
        )

    by_area = share_of_windows(None)
    assert 0.02 < by_area < 0.12  # the windows that happen to show a house
    for balance, share in (('classes', 1 / 3), (dict(house=0.5), 0.5), (dict(house=1), 1)):
        seen = share_of_windows(balance)
        expected = share + (1 - share) * by_area  # three standard deviations of 1,000 draws: 0.045
        assert abs(seen - expected) < 0.06


def test_all_places_around_a_pixel_are_equally_likely(tmp_path: Path) -> None:
    classes = write_rare(tmp_path)
    dataset = random_dataset(tmp_path, dict(house=1), per_epoch=2000)
    np.random.seed(0)
    corners = [(30, 40), (31, 390), (200, 220), (245, 150)]
    places, houses = [], []
    for _ in range(2000):
        scene, column, row = dataset.random_windows.draw(np.random)
        assert scene == 0 and 0 <= column <= 360 and 0 <= row <= 210
        rows, columns = np.nonzero(classes[row : row + 40, column : column + 40] == 1)
        assert len(rows)
        houses.append(
            min(
                corners,
                key=lambda each: abs(each[0] - row - rows[0]) + abs(each[1] - column - columns[0]),
            )
        )
        if houses[-1] == (200, 220):  # the house that is not near an edge of the scene
            places.append((200 - row, 220 - column))
    counts = [houses.count(each) for each in corners]
    assert min(counts) > 400  # equal areas
    offsets = np.array(places)
    assert offsets.min() <= 2 and offsets.max() >= 33
    assert np.abs(offsets.mean(0) - 17.5).max() < 2
    assert np.abs(offsets.std(0) - 35 / 12**0.5).max() < 1.2


def test_no_window_without_labels(tmp_path: Path) -> None:
    """Places that are no-data, unlabeled or of another part are not drawn, however large."""
    classes = write_rare(tmp_path)
    values = paint(classes, 1, 'float32')
    values[:, :, :200] = np.nan
    write_raster(tmp_path / 'scenes/a.tif', values)
    labels = classes.copy()
    labels[50:, 200:] = 9
    write_raster(tmp_path / 'labels/a.tif', labels, nodata=9)
    dataset = random_dataset(tmp_path, per_epoch=200)
    seen_classes(dataset)
    np.random.seed(0)
    places = np.array([dataset.random_windows.draw(np.random)[1:] for _ in range(200)])
    assert places.min(0).tolist() >= [160, 0] and places[:, 1].max() < 50
    split = dict(by='blocks', size=30, share=0.5, part='val')
    part = random_dataset(tmp_path, per_epoch=100, window=24, split=split)
    assert seen_classes(part).any(1).all()
    whole = dict(len=len(random_dataset(tmp_path, per_epoch=None)))
    assert whole['len'] == round(50 * 200 / 40**2)  # what covers the labeled area once
    unlabeled = random_dataset(tmp_path, labels=None, pipeline=PIPELINE[:1], per_epoch=50)
    assert all(unlabeled[index]['valid'].any() for index in range(50))


def test_scenes_are_drawn_by_area_and_may_be_small(tmp_path: Path) -> None:
    write_rare(tmp_path)
    write_raster(tmp_path / 'scenes/b.tif', np.ones((3, 20, 250), 'uint8'))
    write_raster(tmp_path / 'labels/b.tif', np.zeros((20, 250), 'uint8'))
    dataset = random_dataset(tmp_path)
    np.random.seed(0)
    drawn = [dataset.random_windows.draw(np.random) for _ in range(2000)]
    assert 60 < sum(scene for scene, _, _ in drawn) < 140  # 4.8 % of the area
    assert {row for scene, _, row in drawn if scene} == {0}


def test_windows_that_stay(tmp_path: Path) -> None:
    write_scene(tmp_path)

    def places(dataset: Any) -> List[Any]:
        return [dataset.get_data_info(index)['window'] for index in range(len(dataset))]

    dataset = random_dataset(tmp_path, redraw=False, per_epoch=30)
    first = places(dataset)
    assert first == places(dataset) == places(pickle.loads(pickle.dumps(dataset)))
    assert len(set(first)) > 25
    assert first[:20] == places(random_dataset(tmp_path, redraw=False, per_epoch=20))
    assert first != places(random_dataset(tmp_path, redraw=False, per_epoch=30, seed=1))
    assert copy.deepcopy(dataset.get_data_info(0))['windows'] is dataset.random_windows


def drawn(
    root: Path,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    epochs: int = 2,
    wrap: Any = None,
    skip: int = 0,
    infinite: bool = False,
) -> List[List[str]]:
    """Return the names of the windows of each epoch on one rank."""
    dataset: Any = random_dataset(root, 'classes', 12, pipeline=PIPELINE)
    sampler = dict(type='InfiniteSampler' if infinite else 'DefaultSampler', shuffle=True)
    with as_rank(rank, world_size), DefaultScope.overwrite_default_scope('mmseg'):
        loader: DataLoader = build_keyed_loader(
            dict(
                dataset=wrap(dataset) if wrap else dataset,
                sampler=sampler,
                batch_size=2,
                num_workers=workers,
                persistent_workers=workers > 0,
                collate_fn=dict(type='pseudo_collate'),
            ),
            5,
        )
    names = []
    if skip:
        loader.sampler.skip(skip)  # type: ignore[union-attr]
    for epoch in range(epochs):
        getattr(loader.sampler, 'set_epoch', lambda _: None)(epoch)
        batches = itertools.islice(loader, 12) if infinite else loader
        names.append(
            [Path(sample.img_path).name for batch in batches for sample in batch['data_samples']]
        )
    return names


def test_windows_follow_from_seed_epoch_and_place_in_the_epoch(tmp_path: Path) -> None:
    """Not from ranks, virtual ranks, workers, or where the run was interrupted."""
    write_scene(tmp_path)
    alone = drawn(tmp_path)
    assert len(set(alone[0] + alone[1])) == 24  # each epoch has new ones
    assert drawn(tmp_path, workers=2) == alone
    for world_size in (2, 3):
        ranks = [drawn(tmp_path, rank, world_size) for rank in range(world_size)]
        assert [
            [name for names in zip(*(each[epoch] for each in ranks)) for name in names]
            for epoch in range(2)
        ] == alone
    assert drawn(tmp_path, skip=4, epochs=1)[0] == alone[0][4:]
    assert (
        drawn(tmp_path, infinite=True, epochs=1, skip=6)[0][:6]
        == drawn(tmp_path, infinite=True, epochs=1)[0][6:12]
    )


@pytest.mark.parametrize(
    'wrap',
    [
        lambda dataset: RepeatDataset(dataset, 2),
        lambda dataset: ConcatDataset([dataset, random_dataset(Path(dataset.data_root), None, 8)]),
    ],
)
def test_wrapped_datasets_draw_new_windows(tmp_path: Path, wrap: Any) -> None:
    write_scene(tmp_path)
    names = drawn(tmp_path, wrap=wrap)
    assert len(set(names[0] + names[1])) >= len(names[0] + names[1]) - 1
    assert drawn(tmp_path, wrap=wrap, workers=1) == names


def test_views_of_a_group_show_one_place(tmp_path: Path) -> None:
    write_scene(tmp_path)
    views = dict(
        type='GroupedViewsSampler', views=3, sampler=dict(type='DefaultSampler', shuffle=True)
    )

    def names(dataset: Any) -> List[str]:
        loader = build_keyed_loader(
            dict(
                dataset=dataset,
                batch_size=3,
                num_workers=0,
                sampler=dict(views),
                collate_fn=dict(type='pseudo_collate'),
            ),
            5,
        )
        return [Path(sample.img_path).name for batch in loader for sample in batch['data_samples']]

    found = names(random_dataset(tmp_path, per_epoch=4, redraw=False))
    assert len(set(found)) == 4 and found[::3] == found[1::3] == found[2::3]
    redrawn = random_dataset(tmp_path, per_epoch=4)
    for dataset in (redrawn, ConcatDataset([redrawn]), RepeatDataset(redrawn, 2)):
        with pytest.raises(ValueError, match='3 views of a group would show 3 places.*redraw=Fal'):
            names(dataset)


def test_a_window_is_found_again_by_its_key(tmp_path: Path) -> None:
    """Dynamic sampling and cached features load a sample again by index and seed."""
    write_scene(tmp_path)
    dataset = random_dataset(tmp_path, per_epoch=8)
    loader = build_keyed_loader(
        dict(
            dataset=dataset,
            batch_size=2,
            num_workers=0,
            collate_fn=dict(type='pseudo_collate'),
            sampler=dict(type='DefaultSampler', shuffle=True),
        ),
        5,
    )
    loader.samples.keep_keys = True  # type: ignore[attr-defined]
    for batch in loader:
        for inputs, sample in zip(batch['inputs'], batch['data_samples']):
            again = loader.samples.load(*sample.sample_key)  # type: ignore[attr-defined]
            assert again['data_samples'].img_path == sample.img_path
            assert (again['inputs'] == inputs).all()


def test_cached_windows_are_told_apart(tmp_path: Path) -> None:
    write_scene(tmp_path)
    first = sample_hashes(random_dataset(tmp_path, per_epoch=8))
    assert len(set(first)) == 8 and first == sample_hashes(random_dataset(tmp_path, per_epoch=8))
    assert not set(first) & set(sample_hashes(random_dataset(tmp_path, 'classes', 8)))
    write_scene(tmp_path, 'b')  # moves every window
    assert not set(first) & set(sample_hashes(random_dataset(tmp_path, per_epoch=8)))


def test_labels_are_counted_once_until_they_change(tmp_path: Path, monkeypatch: Any) -> None:
    """By the ranks of a machine together, and kept for later starts."""
    _, classes = write_scene(tmp_path)
    write_scene(tmp_path, 'b')
    monkeypatch.setenv('MAPSAGE_SCENE_CACHE', str(tmp_path / 'kept'))

    def kept() -> int:
        return len(list((tmp_path / 'kept').iterdir()))

    first = random_dataset(tmp_path, redraw=False, per_epoch=9)
    assert kept() == 2
    again = random_dataset(tmp_path, 'classes', redraw=False, per_epoch=9)
    assert kept() == 2 and (again.random_windows._cells == first.random_windows._cells).all()
    random_dataset(tmp_path, split=dict(by='blocks', size=30, part='train'))
    assert kept() == 4
    write_raster(tmp_path / 'other/a.tif', np.where(classes == 1, 0, classes))
    write_raster(tmp_path / 'other/b.tif', classes)
    changed = random_dataset(tmp_path, labels='other', redraw=False, per_epoch=9)
    assert kept() == 6 and repr(changed.random_windows) != repr(first.random_windows)


def test_a_new_scene_is_counted_and_the_others_are_not(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv('MAPSAGE_SCENE_CACHE', str(tmp_path / 'cache'))
    for name in 'abc':
        write_rare(tmp_path, name)
        random_dataset(tmp_path, per_epoch=5)
        results = len(list((tmp_path / 'cache').iterdir()))
        assert results == 'abc'.index(name) + 1
        # Files and decoded blocks of thousands of scenes would fill the memory.
        assert not count_open_files(tmp_path / f'labels/{name}.tif')


@pytest.mark.parametrize('cell', [1, 7, 64, 255, 256, 300])
def test_counts_of_cells(cell: int) -> None:
    mask = (
        np.random.RandomState(0)
        .choice([0, 1, 4, 254, 255], (2 * cell, 2 * cell), p=[0.1, 0.2, 0.3, 0.2, 0.2])
        .astype(np.uint8)
    )
    mask[:cell, :cell] = 4
    counts = {
        (number, row, column): int(count)
        for number, corners, in_cells in windows._count_mask(mask, cell, 255)
        for (row, column), count in zip(corners.tolist(), in_cells)
    }
    cells = mask.reshape(2, cell, 2, cell).swapaxes(1, 2)
    expected = {
        (number, row, column): int((cells[row, column] == number).sum())
        for number in (0, 1, 4, 254)
        for row in (0, 1)
        for column in (0, 1)
    }
    assert counts == {key: count for key, count in expected.items() if count}


def test_classes_without_pixels(tmp_path: Path, caplog: Any) -> None:
    _, classes = write_scene(tmp_path)
    write_raster(tmp_path / 'labels/a.tif', np.where(classes == 2, 0, classes))
    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    try:
        seen = seen_classes(random_dataset(tmp_path, 'classes', 200))
    finally:
        logger.removeHandler(caplog.handler)
    assert not seen[:, 2].any() and 0.4 < seen[:, 1].mean() < 0.7
    assert "no pixel is labeled 'water': random windows are balanced among" in caplog.text
    assert re.search(
        r'200 an epoch, at random places, drawn at pixels of ground 50 % \(98.* of '
        r'the area\), house 50 %',
        caplog.text,
    )
    with pytest.raises(GeoError, match="no pixel is labeled 'water'; leave the class out"):
        random_dataset(tmp_path, dict(water=0.5))
    write_raster(tmp_path / 'none/a.tif', np.full_like(classes, 255))
    with pytest.raises(GeoError, match='no pixel of 1 scene.* has data and a label'):
        random_dataset(tmp_path, labels='none')


@pytest.mark.parametrize(
    'windows, message',
    [
        (dict(type='grid'), "type='grid', expected 'random'; leave windows out for a grid"),
        (dict(type='random', length=4), 'windows has no setting length; it has type, per_epoch'),
        (dict(type='random', per_epoch=0), 'per_epoch=0, expected .* at least 1'),
        (dict(type='random', seed=-1), 'seed=-1, expected'),
        (dict(type='random', balance='class'), "balance='class', expected None, 'classes' or dict"),
        (
            dict(type='random', balance=dict(hous=0.2)),
            r"expected .* of the classes \['ground', 'hou",
        ),
        (dict(type='random', balance=dict(house=0.6, water=0.6)), 'together at most 1'),
    ],
)
def test_bad_settings(tmp_path: Path, windows: Dict[str, Any], message: str) -> None:
    write_scene(tmp_path)
    with pytest.raises(GeoError, match=message):
        build_dataset(tmp_path, windows=windows)


def test_scores_need_a_grid(tmp_path: Path) -> None:
    write_scene(tmp_path, place=PIXELS)
    with pytest.raises(GeoError, match='stride=64 is the step of a grid'):
        random_dataset(tmp_path, stride=64)
    loop: Any = type('Loop', (), dict(dataloader=DataLoader(random_dataset(tmp_path))))
    with pytest.raises(GeoError, match='for training; scores need each pixel once'):
        set_test_mode(loop)
    with pytest.raises(GeoError, match='for training; scores need each pixel once'):
        random_dataset(tmp_path, test_mode=True)
