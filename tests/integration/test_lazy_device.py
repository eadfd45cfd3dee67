"""On a lazy device each step runs one graph, and the graphs are compiled once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mask_runs import config_of
from support import ROOT, rest_is_long, write_tiny_config

pytest.importorskip('torch_xla', reason='torch_xla is not installed: the xla leg runs this')

# Clipping reads the gradient norm as a Python float; accumulation skips every other step.
CLIP_AND_ACCUMULATE = """
env_cfg = dict(accelerator='xla')
model['decode_head']['dropout_ratio'] = 0.1
optim_wrapper['clip_grad'] = dict(max_norm=1.0)
optim_wrapper['accumulative_counts'] = 2
optim_wrapper['type'] = '{wrapper}'
train_cfg['max_iters'] = 12
custom_hooks = [dict(type='CountCompilations')]
val_cfg = val_dataloader = val_evaluator = None
"""
COUNT = """
import json, sys
sys.path[:0] = [{root!r}]
import mapsage
import torch_xla.debug.metrics as metrics
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, RUNNERS

@HOOKS.register_module()
class CountCompilations(Hook):
    priority = 'LOWEST'
    seen = []
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        compiled = metrics.metric_data('CompileTime')
        self.seen.append((compiled[0] if compiled else 0, float(outputs['loss'])))

cfg = Config.fromfile({config!r})
cfg.work_dir = {work!r}
RUNNERS.build(cfg).train()
print('SEEN', json.dumps(CountCompilations.seen))
"""


@pytest.mark.parametrize('kind', rest_is_long(['eomt', 'pmt'], 'pmt'))
def test_mask_queries_compile_once(kind: str, tiny_data: Path, tmp_path: Path) -> None:
    """Whatever classes the images hold, and while masks fade out and rates change."""
    cfg = config_of(kind, tiny_data, tmp_path, steps=12, **{'env_cfg.accelerator': 'xla'})
    cfg.custom_hooks.append(dict(type='CountCompilations'))
    cfg.dump(str(tmp_path / 'run.py'))
    counts, losses = compilations(tmp_path / 'run.py', tmp_path)
    assert counts[3] > 0 and counts[-1] == counts[3], counts
    assert all(loss == loss for loss in losses)


@pytest.mark.parametrize(
    'wrapper', rest_is_long(['OptimWrapper', 'AmpOptimWrapper'], 'AmpOptimWrapper')
)
def test_compilations_stop_after_warm_up(wrapper: str, tiny_data: Path, tmp_path: Path) -> None:
    config = write_tiny_config(
        tmp_path / 'tiny.py', tiny_data, CLIP_AND_ACCUMULATE.format(wrapper=wrapper)
    )
    counts, losses = compilations(config, tmp_path)
    assert counts[3] > 0
    # Four iterations show every kind of step twice; nothing is compiled afterward.
    assert counts[-1] == counts[3], counts
    assert losses[-1] < losses[0]


def compilations(config: Path, folder: Path) -> Any:
    """Return the number of programs that were compiled until each step, and the losses."""
    script = COUNT.format(root=str(ROOT), config=str(config), work=str(folder / 'work'))
    done = subprocess.run(
        [sys.executable, '-c', script],
        timeout=400,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        check=False,
        env={'PJRT_DEVICE': 'CPU', 'PATH': '/usr/bin:/bin'},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('SEEN')]
    assert lines, done.stdout[-4000:]
    seen = json.loads(lines[0][4:])
    return [count for count, _ in seen], [loss for _, loss in seen]
