"""Every shipped config of EoMT, PMT and LoRA trains two steps, made small by options."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Iterator, List

import numpy as np
import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import RUNNERS
from small_configs import small_options, write_data
from support import ROOT, main_leg

from mapsage.commands import cli
from mapsage.extras.mask_transformers.annealing_hook import MaskAnnealingHook, mask_probability

pytestmark = [main_leg, pytest.mark.usefixtures('own_environment')]

CONFIGS = sorted(
    str(path.relative_to(ROOT))
    for pattern in (
        'mask_transformers/*.py',
        'dinov3/*lora*.py',
        'demo/*eomt*.py',
        'demo/*pmt*.py',
        'demo/*lora*.py',
    )
    for path in (ROOT / 'configs').glob(pattern)
)


@pytest.fixture(scope='module')
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp('shipped')
    with pytest.MonkeyPatch.context() as patch:
        for name, value in write_data(root).items():
            patch.setenv(name, value)
        yield root


def runner_of(name: str, work: Path) -> Any:
    """Return the runner of a config of this repository."""
    parser = cli.build_parser('Train.')
    given = [str(ROOT / name), '--work-dir', str(work), '--accelerator', 'cpu']
    cfg = cli.load_config(parser.parse_args(given))
    shipped = copy.deepcopy(cfg)
    cfg.merge_from_dict(small_options(cfg))
    for part in ('optim_wrapper', 'param_scheduler', 'custom_hooks'):
        assert cfg.get(part) == shipped.get(part)
    cfg.experiment_name = f'shipped_{Path(name).stem}'
    return RUNNERS.build(cfg)


class Watch(Hook):
    """Keeps the weights before the first step, and the losses."""

    def before_train(self, runner: Any) -> None:
        self.start = {
            name: value.detach().clone() for name, value in runner.model.named_parameters()
        }
        self.losses: List[float] = []

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.losses.append(float(outputs['loss'].detach()))


# One of each kind in every run.
@pytest.mark.parametrize(
    'name',
    [
        name
        if '/demo/' in name or '_web_' not in name and 'loveda' in name
        else pytest.param(name, marks=pytest.mark.long)
        for name in CONFIGS
    ],
)
def test_two_steps_and_a_validation(name: str, folders: Path, tmp_path: Path) -> None:
    """With the config's own optimizer, schedule, hooks, data and weights."""
    runner, watch = runner_of(name, tmp_path), Watch()
    runner.register_hook(watch)
    model = runner.train()
    assert runner.iter == len(watch.losses) == 2 and np.isfinite(watch.losses).all()
    assert 0 <= runner.message_hub.get_scalar('val/mIoU').current() <= 100
    moved = {
        key for key, value in model.named_parameters() if not torch.equal(value, watch.start[key])
    }
    trained = {key for key, value in model.named_parameters() if value.requires_grad}
    assert moved and moved <= trained
    assert {key.split('.')[0] for key in moved} >= {'decode_head'}
    saved = torch.load(str(tmp_path / 'iter_2.pth'), weights_only=False)['state_dict']
    assert trained <= set(saved)
    if not watch.start.keys() <= set(saved):  # what is left out is frozen
        assert 'lora' in name
    hooks = [hook for hook in runner.hooks if isinstance(hook, MaskAnnealingHook)]
    if hooks:
        masked = [mask_probability(2, *phase) for phase in zip(hooks[0].starts, hooks[0].ends)]
        assert saved['decode_head.attn_mask_probs'].tolist() == pytest.approx(masked)
