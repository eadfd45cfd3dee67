"""The commands of the README, from the first to the picture."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import rasterio
from support import ON_MAIN_LEG, Finished, check_finished, launch, write_tiny_config

TTA = """
tta_model = dict(type='SegTTAModel')
tta_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='TestTimeAug', transforms=[
        [dict(type='RandomFlip', prob=0.), dict(type='RandomFlip', prob=1.)],
        [dict(type='LoadAnnotations', reduce_zero_label=True)], [dict(type='PackSegInputs')]])]
"""


def miou(finished: Finished) -> float:
    return float(re.findall(r'\bmIoU: ([\d.]+)', finished.output)[-1])


def losses(finished: Finished) -> list:
    return [float(x) for x in re.findall(r'Iter\(train\).* loss: ([\d.]+)', finished.output)]


def test_quick_start_at_eight_ranks(tmp_path: Path) -> None:
    ranks = (
        8 if ON_MAIN_LEG else 2
    )  # tests/extras/simulator/test_simulated_cards.py has eight elsewhere
    finished = launch(
        '--work-dir',
        tmp_path,
        '--cfg-options',
        'train_cfg.max_iters=3',
        'train_cfg.val_interval=3',
        ranks=ranks,
    )
    check_finished(finished)
    assert f'world size {ranks}' in finished.output
    assert miou(finished) > 0
    assert re.search(r'single_class_mIoU: [\d.]+', finished.output)
    assert f'preview: {tmp_path}/preview.png' in finished.output
    picture = cv2.imread(str(tmp_path / 'preview.png'))
    assert picture.shape[0] > 300 and picture.shape[1] > 300 and picture.std() > 20
    assert list(tmp_path.glob('*/vis_data/*tfevents*')), 'no TensorBoard scalars'
    assert (tmp_path / 'efficientnet_lite0_fpn_demo.py').exists()
    assert f'{tmp_path}/map/scene.tif' in finished.output
    with rasterio.open(str(tmp_path / 'map' / 'scene.tif')) as scene_map:
        values = scene_map.read(1)
        assert scene_map.crs.to_epsg() == 32631 and values.shape == (1024, 1024)
    assert set(np.unique(values)) <= {*range(7), 255} and (values == 255).any()  # a corner
    assert cv2.imread(str(tmp_path / 'map' / 'preview.png')).std() > 20
    report = (tmp_path / 'report.html').read_text(encoding='utf-8')
    assert f'{ranks} rank(s)' in report and 'could not be made' not in report
    assert 'alt="map/scene.tif"' in report  # the map is made when the ranks have left


@pytest.fixture(scope='module')
def trained(tmp_path_factory, tiny_data: Path) -> Path:
    """A work dir with the tiny config and its checkpoint iter_10.pth."""
    work = tmp_path_factory.mktemp('trained')
    config = write_tiny_config(work / 'tiny.py', tiny_data, TTA)
    finished = launch(config, '--work-dir', work / 'work')
    check_finished(finished)
    (work / 'miou').write_text(str(miou(finished)))
    (work / 'losses').write_text(' '.join(map(str, losses(finished))))
    return work


def run_test(trained: Path, *options: str) -> Finished:
    finished = launch(
        trained / 'tiny.py',
        trained / 'work' / 'iter_10.pth',
        '--work-dir',
        trained / 'test',
        *options,
        command=[sys.executable, 'tools/test.py'],
    )
    check_finished(finished)
    return finished


def test_testing_gives_the_figure_of_the_training_log(trained: Path) -> None:
    # two ranks validated during training, one tests
    assert miou(run_test(trained)) == float((trained / 'miou').read_text())


def test_a_test_on_several_ranks_gives_it_too(trained: Path) -> None:
    finished = launch(
        trained / 'tiny.py',
        trained / 'work' / 'iter_10.pth',
        ranks=3,
        command=['bash', 'scripts/test.sh'],
    )
    check_finished(finished)
    assert miou(finished) == float((trained / 'miou').read_text())
    assert list((trained / 'work' / 'test').glob('*/*.log')), 'the folder of the test'
    # the work dir keeps the config of the training
    assert (
        'load_from = None' in (trained / 'work' / 'tiny.py').read_text()
        or 'load_from' not in (trained / 'work' / 'tiny.py').read_text()
    )


def test_out_and_show_dir(trained: Path, tmp_path: Path) -> None:
    run_test(trained, '--out', str(tmp_path / 'out'), '--show-dir', str(tmp_path / 'show'))
    masks = sorted((tmp_path / 'out').glob('*.png'))
    assert len(masks) == 4
    # LoveDA's masks count from 1, and so do those written for its server
    assert set(np.unique(cv2.imread(str(masks[0]), cv2.IMREAD_UNCHANGED))) <= set(range(8))
    assert len(list((tmp_path / 'show').rglob('*.png'))) == 4


def test_tta(trained: Path) -> None:
    assert 0 <= miou(run_test(trained, '--tta')) <= 100


def test_amp_computes_the_same_losses_in_bfloat16(
    trained: Path, tiny_config: Path, tmp_path: Path
) -> None:
    finished = launch(tiny_config, '--work-dir', tmp_path, '--amp')
    check_finished(finished)
    plain = [float(x) for x in (trained / 'losses').read_text().split()]
    assert losses(finished) == pytest.approx(plain, rel=0.03)
    assert losses(finished) != plain
