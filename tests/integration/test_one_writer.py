"""Two trainings in one work dir: the second names the first."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Tuple

import pytest
from color_model import paint, write_scene
from map_runs import run
from rasterio.transform import Affine
from support import Launch, check_finished, launch, on_host

from mapsage.base.folder_claims import claimed
from mapsage.maps.errors import PredictError

UTM = dict(crs='EPSG:32633', transform=Affine(0.5, 0, 500000, 0, -0.5, 5000000))

pytestmark = on_host


def claims(folder: Path) -> int:
    return len(list(folder.glob('.claim-*')))


@pytest.mark.parametrize('ranks', [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_second_training_in_the_work_dir(ranks: int, tiny_config: Path, tmp_path: Path) -> None:
    first = Launch(
        tiny_config,
        '--work-dir',
        tmp_path / 'work',
        '--cfg-options',
        'train_cfg.max_iters=100000',
        'train_cfg.val_interval=100000',
        cold=True,
    )
    first.wait_for(tmp_path / 'work' / 'iter_5.pth')
    second = launch(tiny_config, '--work-dir', tmp_path / 'work', ranks=ranks)
    assert second.status != 0 and second.left_running == []
    holder = re.search(
        r'work is in use: process (\d+) on \S+, since .*, writes the training\. '
        r'Wait for its end, stop it, or choose another --work-dir\.',
        second.final_error,
    )
    assert holder is not None and int(holder.group(1)) in first.running(), second.output[-4000:]
    # the first continues, and its claim stays
    assert first.process.poll() is None and claims(tmp_path / 'work') == 1
    for process in first.running():
        os.kill(process, signal.SIGKILL)
    first.finish()
    # what was killed stops nobody, and the run continues
    done = int((tmp_path / 'work' / 'last_checkpoint').read_text().rpartition('_')[2][:-4])
    check_finished(
        launch(
            tiny_config,
            '--work-dir',
            tmp_path / 'work',
            '--resume',
            '--cfg-options',
            f'train_cfg.max_iters={done + 5}',
            ranks=2,
        )
    )
    assert (tmp_path / 'work' / f'iter_{done + 5}.pth').exists()
    assert claims(tmp_path / 'work') == 0


def test_another_training_may_write_elsewhere(tiny_config: Path, tmp_path: Path) -> None:
    (tmp_path / 'one').mkdir()
    with claimed(tmp_path / 'one', ['the training'], ''):
        check_finished(launch(tiny_config, '--work-dir', tmp_path / 'two'))


def test_a_prediction_that_fails_leaves_no_claim(model: Tuple[Path, Path], tmp_path: Path) -> None:
    scene = write_scene(tmp_path / 'a.tif', paint(80, 90), **UTM)
    with pytest.raises(PredictError, match='--window 64 and --overlap 64'):
        run(model, scene, '--overlap', 64, '--out', tmp_path / 'out')
    assert list((tmp_path / 'out').iterdir()) == []
