"""The shipped configs of encoders for satellite images: from made crops to a map."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator, List

import numpy as np
import pytest
from map_runs import read, run
from mmengine.hooks import Hook
from mmengine.registry import RUNNERS
from support import ROOT, main_leg

from mapsage.commands import cli
from mapsage.extras.demo.crop_places import CropParams, write_crop_places
from mapsage.extras.streaming import cache_features

pytestmark = pytest.mark.usefixtures('own_environment')

# Side of a place and of a window, in pixels.
SIDE = 64
SHORT = {
    'train_cfg.max_iters': 2,
    'train_cfg.val_interval': 2,
    'default_hooks.checkpoint.interval': 2,
    'default_hooks.logger.interval': 1,
    'train_dataloader.batch_size': 2,
    'train_dataloader.num_workers': 0,
    'train_dataloader.persistent_workers': False,
    'val_dataloader.num_workers': 0,
    'val_dataloader.persistent_workers': False,
    'vis_backends': [],
    'visualizer.vis_backends': [],
}


@pytest.fixture(scope='module')
def crops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of the made places, which the configs read."""
    root = tmp_path_factory.mktemp('made') / 'crops'
    write_crop_places(root, CropParams(train_places=2, val_places=1, size=SIDE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('MAPSAGE_CROPS', str(root))
        yield root


# The unit tests train all of them on every leg.
@pytest.mark.parametrize(
    'encoder',
    [
        'olmoearth',
        *(pytest.param(name, marks=main_leg) for name in ('terramind', 'prithvi', 'dofa')),
    ],
)
def test_from_made_crops_to_a_map(encoder: str, crops: Path, tmp_path: Path) -> None:
    """The map is as right as the validation says, with the config that the run has written."""
    work, name = tmp_path / 'work', f'{encoder}_tiny_crops.py'
    parser = cli.build_parser('Train.')
    cfg: Any = cli.load_config(
        parser.parse_args(
            [str(ROOT / 'configs/earth' / name), '--work-dir', str(work), '--accelerator', 'cpu']
        )
    )
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
    assert mapped.mean() > 0.9 and score == pytest.approx(right, abs=0.01)


class Losses(Hook):
    """Losses of a training."""

    def __init__(self) -> None:
        self.values: List[float] = []

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.values.append(float(outputs['loss'].detach()))


@pytest.mark.parametrize('encoder', ['olmoearth', pytest.param('prithvi', marks=main_leg)])
def test_training_on_cached_features_is_training_on_the_images(
    encoder: str, crops: Path, tmp_path: Path
) -> None:
    """A frozen encoder: the losses of both runs are equal, bit for bit."""
    config = tmp_path / 'frozen.py'
    config.write_text(
        f'_base_ = [{str(ROOT / "configs/earth" / f"{encoder}_tiny_crops.py")!r}]\n'
        'model = dict(backbone=dict(frozen=True))\n'
        'train_dataloader = dict(dataset=dict(windows=None, pipeline=[\n'
        '    dict(type=name) for name in (\n'
        "    'LoadSceneStack', 'LoadGeoTiffLabels', 'PackStackInputs')]))\n"
    )
    folder = str(tmp_path / 'features')
    assert (
        cache_features.main(
            [
                str(config),
                '--work-dir',
                str(tmp_path / 'cache'),
                '--folder',
                folder,
                '--accelerator',
                'cpu',
            ]
        )
        == 0
    )
    losses = []
    for source in (None, dict(type='Cached', folder=folder)):
        cfg: Any = cli.load_config(
            cli.build_parser('Train.').parse_args(
                [
                    str(config),
                    '--work-dir',
                    str(tmp_path / f'{len(losses)}'),
                    '--accelerator',
                    'cpu',
                ]
            )
        )
        cfg.merge_from_dict(dict(SHORT, feature_source=source) if source else SHORT)
        cfg.experiment_name = f'cached_{encoder}_{len(losses)}'
        cfg.val_dataloader = cfg.val_cfg = cfg.val_evaluator = None
        runner, record = RUNNERS.build(cfg), Losses()
        runner.register_hook(record)
        runner.train()
        losses.append(record.values)
    assert len(losses[0]) == 2 and losses[0] == losses[1]
