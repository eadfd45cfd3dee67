"""The shipped configs of change, trained for a few steps on made pairs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Iterator

import pytest
from mmengine.registry import RUNNERS
from support import ROOT, main_leg

from mapsage.commands import cli
from mapsage.extras.demo import ChangeParams, write_change_pairs

pytestmark = pytest.mark.usefixtures('own_environment')

CONFIGS = sorted((ROOT / 'configs' / 'change').glob('*.py'))
# siamese_fpn_change has the model of siamese_fpn_from_to and the data of the others.
TRAINED = [path for path in CONFIGS if path.stem != 'siamese_fpn_change']
STEPS = 3
SMALL = ChangeParams(train_scenes=6, val_scenes=1, scene_size=128, tile_size=64, pair_size=128)


@pytest.fixture(scope='module')
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Pairs where the configs look for them."""
    root = tmp_path_factory.mktemp('pairs') / 'change'
    write_change_pairs(root, SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('MAPSAGE_CHANGE', str(root))
        yield root


def trained(path: Path, work: Path) -> Any:
    """Train a config for a few steps of two pairs, with its own optimizer; return the runner."""
    parser = cli.build_parser('Train.')
    cfg = cli.load_config(
        parser.parse_args([str(path), '--work-dir', str(work), '--accelerator', 'cpu'])
    )
    cfg.merge_from_dict(
        {
            'train_cfg.max_iters': STEPS,
            'train_cfg.val_interval': STEPS,
            'train_dataloader.batch_size': 2,
            'model.data_preprocessor.size': (64, 64),
            'default_hooks.checkpoint.interval': STEPS,
            'vis_backends': [],
            'visualizer.vis_backends': [],
        }
    )
    cfg.experiment_name = f'change_{path.stem}'
    runner = RUNNERS.build(cfg)
    runner.train()
    return runner


def test_there_are_configs_of_change_and_of_from_to_classes() -> None:
    assert {'unet_change', 'siamese_fpn_change', 'siamese_fpn_from_to'} <= {
        path.stem for path in CONFIGS
    }


@main_leg
@pytest.mark.parametrize('path', TRAINED, ids=lambda path: path.stem)
def test_a_shipped_config_trains_and_scores_change(path: Path, pairs: Path, tmp_path: Path) -> None:
    runner = trained(path, tmp_path)
    assert runner.iter == STEPS
    losses, _ = runner.message_hub.get_scalar('train/loss').data
    assert len(losses) == STEPS and all(math.isfinite(loss) for loss in losses)
    metric = runner.val_evaluator.metrics[0]
    classes = metric.dataset_meta['classes']
    assert metric.matrix.shape == (len(classes), len(classes))
    # Every labeled pixel of the four validation pairs is counted once.
    assert 0 < metric.matrix.sum() <= 4 * 64 * 64
    assert 0 <= runner.message_hub.get_scalar('val/aAcc').current() <= 100
    if 'from_to' in path.stem:
        assert classes[0] == 'unchanged' and 'forest > barren' in classes
        # Rows are the truth: more than one from-to class occurs, each counted in its own row.
        assert (metric.matrix[1:].sum(1) > 0).sum() >= 2
        assert 'val/SCD_Score' in runner.message_hub.log_scalars
