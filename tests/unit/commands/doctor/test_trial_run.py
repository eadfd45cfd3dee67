"""The doctor's trial build of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from mmengine.config import Config

from mapsage.commands.doctor.trial_run import run_obstacle


@pytest.mark.usefixtures('own_environment')
def test_a_run_is_built_and_leaves_nothing(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = Config.fromfile(str(tiny_config))
    cfg.update(
        work_dir=str(tmp_path / 'work'),
        launcher='none',
        env_cfg=dict(accelerator='cpu'),
        resume=True,
        load_from='no_such.pth',
    )
    before = cfg.to_dict()
    files = sorted(tmp_path.rglob('*'))
    for _ in range(2):  # within one second, in which MMEngine gives two runs one name
        assert run_obstacle(cfg) is None
    assert cfg.to_dict() == before and sorted(tmp_path.rglob('*')) == files


@pytest.mark.usefixtures('own_environment')
@pytest.mark.parametrize(
    'key, value, words',
    [
        ('custom_hooks', [dict(type='NoSuchHook')], 'NoSuchHook'),
        ('optim_wrapper', dict(type='OptimWrapper', optimizer=dict(type='SGD', rate=1)), 'rate'),
        ('env_cfg', dict(accelerator='cpu', virtual_rank=2), 'virtual_rank'),
        ('default_hooks', dict(logger=dict(type='LoggerHook', intervall=2)), 'intervall'),
    ],
)
def test_what_keeps_a_run_from_being_built_is_named(
    key: str, value: object, words: str, tiny_config: Path
) -> None:
    cfg = Config.fromfile(str(tiny_config))
    cfg.update(launcher='none', env_cfg=dict(accelerator='cpu'))
    cfg[key] = value
    assert words in str(run_obstacle(cfg))
