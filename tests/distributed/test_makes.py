"""Devices of other makes, by doubles of their plugins, train as the CPU does, on 2 ranks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch.distributed as dist
from doubles import MAKES, make
from ranks import run_ranks
from support import (
    ROOT,
    check_finished,
    launch,
    main_leg,
    rest_is_long,
    why_no_make,
    write_tiny_config,
)
from warm_python import warm_python

pytestmark = [main_leg, pytest.mark.skipif(bool(why_no_make()), reason=why_no_make())]

SHORT = """
train_cfg.update(max_iters=2, val_interval=2)
"""
BACKENDS = {'npu': 'hccl', 'mlu': 'cncl', 'musa': 'mccl', 'flagos': 'flagos'}


def train(config: str, work: str, accelerator: str) -> Dict[str, Any]:
    """Train as one rank; return losses, devices and backend."""
    from mmengine.config import Config
    from mmengine.registry import RUNNERS

    cfg = Config.fromfile(config)
    cfg.launcher, cfg.work_dir, cfg.env_cfg.accelerator = 'pytorch', work, accelerator
    runner = RUNNERS.build(cfg)
    runner.train()
    return dict(
        devices=sorted({str(p.device) for p in runner.model.parameters()}),
        backend=dist.get_backend(),
    )


def losses(work: Path) -> List[float]:
    log = next(work.glob('*/vis_data/scalars.json'))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert 'mIoU' in lines.pop()
    return [line['loss'] for line in lines]


@pytest.fixture(scope='module')
def reference(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> List[float]:
    """Losses of the run on the CPU."""
    folder = tmp_path_factory.mktemp('cpu')
    config = write_tiny_config(folder / 'tiny.py', tiny_data, SHORT)
    run_ranks(train, 2, folder, str(config), str(folder / 'work'), 'cpu')
    return losses(folder / 'work')


@pytest.mark.parametrize('name', rest_is_long(MAKES, 'npu'))
def test_two_ranks_train_as_the_cpu_does(
    name: str, tiny_data: Path, tmp_path: Path, reference: List[float]
) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, SHORT)
    ranks = run_ranks(
        train,
        2,
        tmp_path,
        str(config),
        str(tmp_path / 'work'),
        name,
        environ={**make(name), 'MAPSAGE_SIM_RANDOM': 'cpu'},
    )
    assert [rank['devices'] for rank in ranks] == [[f'{name}:0'], [f'{name}:1']]
    assert ranks[0]['backend'] == f'cpu:gloo,{name}:{BACKENDS[name]}'
    assert losses(tmp_path / 'work') == pytest.approx(reference, rel=1e-4)


def test_the_doctor_examines_a_make() -> None:
    finished = subprocess.run(
        [warm_python(), 'tools/doctor.py'],
        env={**os.environ, **make('musa')},
        cwd=str(ROOT),
        stdout=subprocess.PIPE,
        universal_newlines=True,
        timeout=120,
    )
    assert finished.returncode == 0 and finished.stdout.endswith('result: training would start\n')
    for line in (
        'torch_musa',
        'musa (8 device(s), gradients over mccl): found by auto',
        'backend cpu:gloo,musa:mccl: not used by one process',
        'musa:0 allocates and computes',
        'musa, tried on the card: int64 yes, ',
    ):
        assert f'\n  ok       {line}' in finished.stdout
    assert 'plugin:' not in finished.stdout and 'cpu: usable, not chosen' in finished.stdout


def test_the_launcher_finds_a_make_and_says_so(tiny_data: Path, tmp_path: Path) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, SHORT)
    finished = launch(config, '--work-dir', tmp_path / 'work', ranks=2, environ=make('npu'))
    check_finished(finished)
    assert 'accelerator npu (8 device(s), gradients over hccl) [cuda: ' in finished.output
    assert (
        'npu, tried on the card: int64 yes, float64 yes, bfloat16 yes, SyncBN no, foreach '
        'optimizers yes, fused optimizers no'
    ) in finished.output
