"""The shipped configs of encoders for satellite images: from made crops to a map."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest
from map_runs import read, run
from mmengine.registry import RUNNERS
from support import ROOT, main_leg

from mapsage.commands import cli
from mapsage.datasets.demo.crop_places import CropParams, write_crop_places

pytestmark = pytest.mark.usefixtures('own_environment')

# Side of a place and of a window, in pixels.
SIDE = 64
SHORT = {
    'train_cfg.max_iters': 2, 'train_cfg.val_interval': 2, 'default_hooks.checkpoint.interval': 2,
    'default_hooks.logger.interval': 1, 'train_dataloader.batch_size': 2,
    'train_dataloader.num_workers': 0, 'train_dataloader.persistent_workers': False,
    'val_dataloader.num_workers': 0, 'val_dataloader.persistent_workers': False,
    'vis_backends': [], 'visualizer.vis_backends': []}


@pytest.fixture(scope='module')
def crops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of the made places, which the configs read."""
    root = tmp_path_factory.mktemp('made') / 'crops'
    write_crop_places(root, CropParams(train_places=2, val_places=1, size=SIDE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('MAPSAGE_CROPS', str(root))
        yield root


# The unit tests train all of them on every leg.
@pytest.mark.parametrize('encoder', ['olmoearth', *(
    pytest.param(name, marks=main_leg) for name in ('terramind', 'prithvi', 'dofa'))])
def test_from_made_crops_to_a_map(encoder: str, crops: Path, tmp_path: Path) -> None:
    """The map is as right as the validation says, with the config that the run has written."""
    work, name = tmp_path / 'work', f'{encoder}_tiny_crops.py'
    parser = cli.build_parser('Train.')
    cfg: Any = cli.load_config(parser.parse_args([
        str(ROOT / 'configs/earth' / name), '--work-dir', str(work), '--accelerator', 'cpu']))
    cfg.merge_from_dict(SHORT)
    cfg.experiment_name = f'earth_{encoder}'
    runner = RUNNERS.build(cfg)
    runner.train()
    score = runner.message_hub.get_scalar('val/aAcc').current()
    model = work / name, work / 'iter_2.pth'
    assert run(model, crops / 'val', '--out', tmp_path / 'maps') == 0
    classes, labels = read(tmp_path / 'maps/val0.tif'), read(crops / 'val/labels/val0.tif')
    assert classes.shape == labels.shape == (SIDE, SIDE)
    mapped = classes != 255
    right = 100 * float(np.mean(classes[mapped] == labels[mapped]))
    assert mapped.mean() > .9 and score == pytest.approx(right, abs=.01)
