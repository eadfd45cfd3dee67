"""On a lazy device each step runs one graph, and the graphs are compiled once."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, write_tiny_config

pytest.importorskip('torch_xla', reason='torch_xla is not installed: the xla leg runs this')

# Clipping reads the gradient norm as a Python float; accumulation skips every other step.
CLIP_AND_ACCUMULATE = '''
env_cfg = dict(accelerator='xla')
model['decode_head']['dropout_ratio'] = 0.1
optim_wrapper['clip_grad'] = dict(max_norm=1.0)
optim_wrapper['accumulative_counts'] = 2
optim_wrapper['type'] = '{wrapper}'
train_cfg['max_iters'] = 12
custom_hooks = [dict(type='CountCompilations')]
val_cfg = val_dataloader = val_evaluator = None
'''
COUNT = '''
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
'''


@pytest.mark.parametrize('wrapper', ['OptimWrapper', 'AmpOptimWrapper'])
def test_compilations_stop_after_warm_up(wrapper: str, tiny_data: Path, tmp_path: Path) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data,
                               CLIP_AND_ACCUMULATE.format(wrapper=wrapper))
    script = COUNT.format(root=str(ROOT), config=str(config), work=str(tmp_path / 'work'))
    done = subprocess.run([sys.executable, '-c', script], timeout=400, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, universal_newlines=True, check=False,
                          env={'PJRT_DEVICE': 'CPU', 'PATH': '/usr/bin:/bin'})
    lines = [line for line in done.stdout.splitlines() if line.startswith('SEEN')]
    assert lines, done.stdout[-4000:]
    seen = json.loads(lines[0][4:])
    counts, losses = [count for count, _ in seen], [loss for _, loss in seen]
    assert counts[3] > 0
    # Four iterations show every kind of step twice; nothing is compiled afterward.
    assert counts[-1] == counts[3], counts
    assert losses[-1] < losses[0]
