"""Stock models train on simulated cards as they do on the CPU, with all that a run has."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from ranks import run_ranks
from support import no_simulated_cards, write_tiny_config

reason = no_simulated_cards()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))


def train(name: str, config: str, work: Path, **changes: Any) -> Dict[str, Any]:
    """Train a stock model; return its losses and final weights, in host memory."""
    from mmengine.config import Config
    from mmengine.hooks import Hook
    from mmengine.registry import MODELS, RUNNERS
    from small_segmentors import SMALL_SEGMENTORS, predict_classes

    losses: List[float] = []

    class Recorder(Hook):
        def after_train_iter(
            self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
        ) -> None:
            losses.append(float(outputs['loss']))

    predict_classes(7)  # of the tiny data
    MODELS.register_module('SmallSegmentor', module=SMALL_SEGMENTORS[name], force=True)
    cfg = Config.fromfile(config)
    cfg.merge_from_dict(
        {
            'model': dict(_delete_=True, type='mmengine.SmallSegmentor'),
            'work_dir': str(work),
            'experiment_name': work.name,
            'train_cfg.max_iters': 4,
            'optim_wrapper.optimizer.lr': 0.01,
            'default_hooks.checkpoint.interval': 2,
            **changes,
        }
    )
    for key in (
        'val_cfg',
        'val_dataloader',
        'val_evaluator',
        'test_cfg',
        'test_dataloader',
        'test_evaluator',
    ):
        cfg[key] = None
    runner = RUNNERS.build(cfg)
    runner.register_hook(Recorder())
    model = runner.train()
    devices = {str(p.device) for p in model.parameters()}
    return dict(
        losses=losses,
        devices=devices,
        weights={key: value.cpu() for key, value in model.state_dict().items()},
    )


def compare_devices(name: str, config: str, folder: Path) -> Dict[str, Any]:
    def on(accelerator: str, run: str, **changes: Any) -> Dict[str, Any]:
        return train(name, config, folder / run, **{'env_cfg.accelerator': accelerator, **changes})

    amp = {
        'optim_wrapper.type': 'AmpOptimWrapper',
        'optim_wrapper.dtype': 'bfloat16',
        'optim_wrapper.clip_grad': dict(max_norm=1.0),
    }
    return dict(  # simulated cards first: PyTorch counts devices at the first backward pass
        sim=on('sim', 'sim'),
        amp=on('sim', 'amp', **amp),
        resumed=on(
            'sim', 'resumed', resume=True, load_from=str(folder / 'amp' / 'iter_2.pth'), **amp
        ),
        cpu=on('cpu', 'cpu'),
    )


@pytest.mark.parametrize('name', ['resnet_fcn', 'vit_upernet', 'segformer'])
def test_stock_models_train_on_simulated_cards(name: str, tiny_data: Path, tmp_path: Path) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data)
    ran = run_ranks(
        compare_devices,
        1,
        tmp_path / 'ranks',
        name,
        str(config),
        tmp_path,
        timeout=200,
        environ={'PYTHONPATH': str(Path(__file__).parents[2])},
    )[0]
    assert ran['cpu']['devices'] == {'cpu'} and ran['sim']['devices'] == {'gcu:0'}
    assert len(ran['sim']['losses']) == 4
    assert ran['sim']['losses'] == pytest.approx(ran['cpu']['losses'], rel=1e-4)
    for key, value in ran['cpu']['weights'].items():
        torch.testing.assert_close(ran['sim']['weights'][key], value, rtol=1e-3, atol=1e-4)
    assert ran['amp']['losses'] == pytest.approx(ran['sim']['losses'], rel=0.05)
    assert ran['amp']['losses'] != ran['sim']['losses']  # bfloat16 rounds
    assert ran['resumed']['losses'] == ran['amp']['losses'][2:]
    for key, value in ran['amp']['weights'].items():
        assert torch.equal(ran['resumed']['weights'][key], value), key
