"""The T20 line through the user's launcher: real lazy devices behind a double of torch_gcu."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from doubles import T20
from support import Finished, check_finished, launch, write_tiny_config

pytest.importorskip('torch_xla', reason='torch_xla is not installed: the xla leg runs this')

# Every rank writes down its final weights, its losses, and the compilations after each step.
WITNESS = """
import torch
import torch.distributed as dist
import torch_xla.debug.metrics as metrics
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

def refuse_device_tensors(collective):
    def checked(*args, **kwargs):
        for arg in args:
            for tensor in arg if isinstance(arg, (list, tuple)) else [arg]:
                assert not isinstance(tensor, torch.Tensor) or tensor.is_cpu, (
                    f'{collective.__name__} of a tensor on {tensor.device} reached gloo')
        return collective(*args, **kwargs)
    return checked

for name in ('all_reduce', 'all_gather', 'broadcast', 'reduce', 'gather', 'scatter'):
    setattr(dist, name, refuse_device_tensors(getattr(dist, name)))

@HOOKS.register_module()
class Witness(Hook):
    priority = 'LOWEST'
    def before_train(self, runner):
        import torch_gcu.distributed as eccl
        assert dist.get_backend() == 'gloo' and eccl.get_world_size() == dist.get_world_size()
        self.compiled, self.losses = [], []
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        compiled = metrics.metric_data('CompileTime')
        self.compiled.append(compiled[0] if compiled else 0)
        self.losses.append(float(outputs['loss']))
    def after_train(self, runner):
        module = runner.model.module
        torch.save(dict(
            wrapper=type(runner.model).__name__, compiled=self.compiled, losses=self.losses,
            devices=sorted({str(p.device) for p in module.parameters()}),
            weights={k: v.cpu() for k, v in module.state_dict().items()},
        ), f'{runner.work_dir}/rank{dist.get_rank()}.pth')
"""
SETTINGS = """
custom_imports = dict(imports=['mapsage', 'witness'])
custom_hooks = [dict(type='Witness')]
# two levels of four channels: most of the time goes into compiling
model['backbone'].update(
    base_channels=4, num_stages=2, strides=(1, 1), enc_num_convs=(1, 1), dec_num_convs=(1,),
    downsamples=(True,), enc_dilations=(1, 1), dec_dilations=(1,))
model['decode_head'].update(in_channels=4, in_index=1, channels=4)
"""
NO_VALIDATION = """
val_cfg = val_dataloader = val_evaluator = None
"""
# Clipping reads the gradient norm as a Python float; accumulation steps every other iteration.
HARD = """
model['decode_head']['dropout_ratio'] = 0.1
optim_wrapper['clip_grad'] = dict(max_norm=1.0)
optim_wrapper['accumulative_counts'] = 2
optim_wrapper['type'] = 'AmpOptimWrapper'
model_wrapper_cfg = dict(type='MMDistributedDataParallel', find_unused_parameters=True)
"""


def train(folder: Path, data: Path, *options: Any, ranks: int, extra: str = '') -> Finished:
    (folder / 'witness.py').write_text(WITNESS)
    config = write_tiny_config(folder / 'tiny.py', data, SETTINGS + extra)
    path = f'{T20["PYTHONPATH"]}:{folder}'
    finished = launch(
        config,
        '--work-dir',
        folder / 'work',
        *options,
        ranks=ranks,
        timeout=400,
        environ={**T20, 'PYTHONPATH': path, 'ACCELERATOR': 'gcu_t20'},
    )
    check_finished(finished)
    return finished


def seen(folder: Path, ranks: int) -> List[Dict[str, Any]]:
    return [
        torch.load(str(folder / 'work' / f'rank{rank}.pth'), weights_only=False)
        for rank in range(ranks)
    ]


def check_equal(one: Dict[str, torch.Tensor], other: Dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.fixture(scope='module')
def two(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """Where two ranks of batch 2 trained and validated."""
    folder = tmp_path_factory.mktemp('two')
    output = train(folder, tiny_data, ranks=2).output
    assert 'accelerator gcu_t20 (8 device(s), gradients over eccl)' in output
    assert 'mIoU' in output
    return folder


def test_two_ranks_equal_one(two: Path, tiny_data: Path, tmp_path: Path) -> None:
    train(
        tmp_path,
        tiny_data,
        '--cfg-options',
        'train_dataloader.batch_size=4',
        ranks=1,
        extra=NO_VALIDATION,
    )
    (one,), (first, second) = seen(tmp_path, 1), seen(two, 2)
    assert {each['wrapper'] for each in (one, first, second)} == {'NativeDataParallel'}
    assert [each['devices'] for each in (one, first, second)] == [['xla:0'], ['xla:0'], ['xla:1']]
    check_equal(first['weights'], second['weights'])
    for name in one['weights']:
        torch.testing.assert_close(
            first['weights'][name], one['weights'][name], rtol=1e-4, atol=1e-5, msg=name
        )
    assert first['losses'] != second['losses']  # each rank had samples of its own


def test_resumed(two: Path, tiny_data: Path, tmp_path: Path) -> None:
    shutil.copytree(str(two / 'work'), str(tmp_path / 'work'))
    whole = torch.load(str(tmp_path / 'work' / 'iter_10.pth'), weights_only=False)
    assert {tensor.device.type for tensor in whole['state_dict'].values()} == {'cpu'}
    for name in ('iter_10.pth', 'last_checkpoint'):  # the second names the folder it was written in
        (tmp_path / 'work' / name).unlink()
    train(tmp_path, tiny_data, '--resume', ranks=2, extra=NO_VALIDATION)
    resumed = torch.load(str(tmp_path / 'work' / 'iter_10.pth'), weights_only=False)
    check_equal(whole['state_dict'], resumed['state_dict'])
    first, second = (state['optimizer']['state'] for state in (whole, resumed))
    for index in first:
        assert torch.equal(first[index]['momentum_buffer'], second[index]['momentum_buffer'])
    assert len(seen(tmp_path, 2)[0]['losses']) == 5


def test_mixed_precision_and_compilations(tiny_data: Path, tmp_path: Path) -> None:
    train(tmp_path, tiny_data, ranks=2, extra=HARD + NO_VALIDATION)
    first, second = seen(tmp_path, 2)
    check_equal(first['weights'], second['weights'])
    for rank in (first, second):
        # Four iterations show every kind of step twice. The fifth is followed by a checkpoint
        # inside an accumulation cycle, which compiles the exchange of gradients; and that is all.
        assert 0 < rank['compiled'][4] == rank['compiled'][-1], rank['compiled']
        assert rank['compiled'][4] <= rank['compiled'][3] + 1, rank['compiled']
        assert all(loss < 2.2 for loss in rank['losses'])
