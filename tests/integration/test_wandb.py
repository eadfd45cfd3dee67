"""A run that writes to Weights & Biases without a network: scalars and config are in its offline file."""

from __future__ import annotations

from pathlib import Path

import pytest

import mapsage

wandb = pytest.importorskip('wandb', reason='wandb is not installed: pip install wandb')


def test_an_offline_run_holds_scalars_and_config(
    tmp_path: Path,
    tiny_config: Path,
    signals_as_before: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv('WANDB_MODE', 'offline')
    with tiny_config.open('a', encoding='utf-8') as file:
        file.write(
            "\nvis_backends = [dict(type='LocalVisBackend'), dict(type='WandbVisBackend', "
            "init_kwargs=dict(project='maps'))]\n"
            "visualizer = dict(type='SegLocalVisualizer', vis_backends=vis_backends)\n"
        )
    short = {'train_cfg.max_iters': 2, 'train_cfg.val_interval': 2}
    run = mapsage.train(tiny_config, tmp_path / 'run', short, accelerator='cpu')
    # As at the end of a process.
    wandb.teardown()
    (offline,) = (tmp_path / 'run').rglob('offline-run-*/*.wandb')
    content = offline.read_bytes()
    assert run.checkpoint.exists()
    # Names of a training's scalars, of a score, and of a setting.
    for name in (b'decode.loss_ce', b'mIoU', b'val_interval'):
        assert name in content, name
