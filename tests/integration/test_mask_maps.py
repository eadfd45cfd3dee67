"""Maps of trained EoMT and PMT: tools/predict.py against the model's own scores."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any, Dict, Tuple

import cv2
import numpy as np
import pyogrio
import pytest
import torch
from map_runs import read, run
from mask_models import build, samples_of
from mask_runs import config_of
from mmengine.config import Config
from mmengine.registry import RUNNERS
from ranks import run_ranks
from support import ON_MAIN_LEG, on_host

from mapsage.extras.labels import suggest_labels
from mapsage.maps.windows import blend_weights

pytestmark = [on_host, pytest.mark.usefixtures('own_environment')]
SIDE = 64
Trained = Tuple[Tuple[Path, Path], Any, Path]
SETTINGS: Dict[str, Any] = {'steps': 4}


def train(kind: str, data: Path, folder: Path) -> None:
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'):
        os.environ.pop(name, None)
    cfg = config_of(kind, data, folder, **SETTINGS)
    start = build(cfg.model.to_dict())
    with torch.no_grad():  # queries that differ, so that there is more than one class in a map
        start.decode_head.class_head.weight.mul_(20)
        start.decode_head.mask_head[4].weight.mul_(20)
    torch.save(dict(state_dict=start.state_dict()), str(folder / 'start.pth'))
    cfg.load_from = str(folder / 'start.pth')
    RUNNERS.build(cfg).train()


@pytest.fixture(scope='module', params=['eomt', 'pmt'])
def trained(
    request: pytest.FixtureRequest, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    """Config and checkpoint of a short training, the model with its weights, and the data."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    run_ranks(
        train,
        1,
        folder / 'rank',
        kind,
        tiny_data,
        folder,
        environ={'PYTHONPATH': str(Path(__file__).parents[1])},
    )
    config_of(kind, tiny_data, folder, **SETTINGS).dump(str(folder / 'run.py'))
    cfg = Config.fromfile(str(folder / 'run.py'))
    model = build(cfg.model.to_dict())
    checkpoint = folder / 'iter_4.pth'
    loaded = torch.load(
        str(checkpoint),
        map_location='cpu',
        **({'weights_only': False} if torch.__version__ >= '2' else {}),
    )
    model.load_state_dict(loaded['state_dict'])
    return (folder / 'run.py', checkpoint), model.eval(), tiny_data


def scene_of(data: Path, folder: Path, tiles: int) -> Tuple[Path, torch.Tensor]:
    """An image of tiles side by side; its pixels (3, 64, 64 tiles) as OpenCV reads them."""
    image = np.concatenate(
        [cv2.imread(str(data / 'img_dir' / 'val' / f'{number}.png')) for number in range(tiles)],
        axis=1,
    )
    cv2.imwrite(str(folder / 'scene.png'), image)
    return folder / 'scene.png', torch.from_numpy(image.transpose(2, 0, 1).copy())


def scores_of(model: Any, image: torch.Tensor) -> torch.Tensor:
    """What MMSegmentation's own test gives for a whole image, (classes, H, W)."""
    sample = samples_of(torch.zeros(1, *image.shape[1:], dtype=torch.long))
    with torch.no_grad():
        return model.test_step(dict(inputs=[image], data_samples=sample))[0].seg_logits.data


def check(folder: Path, expected: torch.Tensor) -> None:
    """The classes but for ties, and the scores in percent."""
    classes = torch.from_numpy(read(folder / 'scene.tif').astype(np.int64))
    best = expected.max(0).values
    assert len(torch.unique(classes)) > 1
    taken = expected.gather(0, classes[None])[0]
    torch.testing.assert_allclose(taken, best, rtol=1e-4, atol=1e-5)
    confidence = read(folder / 'scene_confidence.tif').astype(float)
    wanted = 100 * best.clamp(max=1).numpy()
    assert np.abs(confidence - wanted).max() <= 0.51 and np.ptp(confidence) > 5


def test_a_window_that_covers_the_scene_is_the_whole_image(
    trained: Trained, tmp_path: Path
) -> None:
    model, own, data = trained
    scene, image = scene_of(data, tmp_path, 1)
    assert (
        run(
            model, scene, '--out', tmp_path / 'out', '--confidence', '--polygons', '--simplify', '0'
        )
        == 0
    )
    check(tmp_path / 'out', scores_of(own, image))
    info, _, _, columns = pyogrio.raw.read(tmp_path / 'out' / 'scene.gpkg', layer='map')
    fields = dict(zip(info['fields'], columns))
    classes = read(tmp_path / 'out' / 'scene.tif')
    names = own_names()
    for number in np.unique(classes):
        mine = fields['class_name'] == names[number]
        assert fields['area_px'][mine].sum() == (classes == number).sum()


def own_names() -> Any:
    from mmseg.datasets import LoveDADataset

    return LoveDADataset.METAINFO['classes']


def test_windows_are_blended_as_scores(trained: Trained, tmp_path: Path) -> None:
    """Three windows, each weighted over an overlap of 32 pixels; without a softmax."""
    model, own, data = trained
    scene, image = scene_of(data, tmp_path, 2)
    assert run(model, scene, '--out', tmp_path / 'out', '--confidence', '--overlap', 32) == 0
    weights = torch.from_numpy(np.outer(blend_weights(SIDE, 32), blend_weights(SIDE, 32)))
    total, divisor = torch.zeros(7, SIDE, 2 * SIDE), torch.zeros(SIDE, 2 * SIDE)
    for start in (0, 32, 64):
        total[:, :, start : start + SIDE] += (
            scores_of(own, image[:, :, start : start + SIDE]) * weights
        )
        divisor[:, start : start + SIDE] += weights
    check(tmp_path / 'out', total / divisor)


def test_masks_and_suggested_windows_take_scores(trained: Trained, tmp_path: Path) -> None:
    """Pseudo-labels by the scores as they are; margins by their shares, which sum to 1."""
    model, own, data = trained
    scene, image = scene_of(data, tmp_path, 1)
    scores = scores_of(own, image).clamp(min=0)
    wanted = np.rint(100 * scores.max(0).values.clamp(max=1).numpy())
    limit = int(wanted.min() + wanted.max()) // 2
    run(
        model,
        scene,
        '--pseudo-labels',
        tmp_path / 'more',
        '--min-share',
        0,
        '--min-confidence',
        limit / 100,
    )
    mask = cv2.imread(str(tmp_path / 'more/masks/scene.png'), cv2.IMREAD_UNCHANGED)
    clear = np.abs(wanted - limit) > 1
    np.testing.assert_array_equal((mask != 255)[clear], (wanted >= limit)[clear])
    assert 0 < (mask != 255).sum() < mask.size
    np.testing.assert_array_equal(
        mask[mask != 255], read(tmp_path / 'more/maps/scene.tif')[mask != 255]
    )
    suggest_labels.main(
        [*map(str, model), str(scene), '--out', str(tmp_path / 'next.csv'), '--accelerator', 'cpu']
    )
    with open(str(tmp_path / 'next.csv')) as file:
        (line,) = csv.DictReader(file)
    top = (scores / scores.sum(0)).topk(2, 0).values
    assert abs(float(line['margin']) - float((1 - (top[0] - top[1])).mean())) < 1e-3


@pytest.mark.skipif(not ON_MAIN_LEG, reason='the layer norm of torch 1.10 takes no bfloat16')
def test_mixed_precision_gives_nearly_the_same_map(trained: Trained, tmp_path: Path) -> None:
    model, own, data = trained
    scene, image = scene_of(data, tmp_path, 1)
    assert run(model, scene, '--out', tmp_path / 'out', '--confidence', '--amp') == 0
    exact = scores_of(own, image)
    classes = torch.from_numpy(read(tmp_path / 'out' / 'scene.tif').astype(np.int64))
    assert float((exact.max(0).values - exact.gather(0, classes[None])[0]).max()) < 0.15
    confidence = read(tmp_path / 'out' / 'scene_confidence.tif').astype(float)
    assert np.abs(confidence - 100 * exact.max(0).values.clamp(max=1).numpy()).max() < 5
