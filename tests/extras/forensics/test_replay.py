"""An iteration that is carried out again has the numbers of the run, and leaves the run alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from scaled_on_cpu import HAS_SCALER
from toy_runs import toy_config, toy_train

from mapsage.engine.guards import NonFiniteLossError
from mapsage.extras.forensics.replay import ReplayError, replay
from mapsage.extras.forensics.step_recorder import plain

EPOCHS: Dict[str, Any] = {
    'train_cfg': dict(by_epoch=True, max_epochs=2, val_interval=1),
    'train_dataloader.sampler.type': 'DefaultSampler',
    'train_dataloader.dataset.length': 10,
    'default_hooks.checkpoint': dict(interval=1, by_epoch=True),
}  # 5 iterations each
LOAD = {'weights_only': False} if torch.__version__ >= '2' else {}
SCHEDULE = [dict(type='LinearLR', start_factor=0.1, begin=0, end=6, by_epoch=False)]


def replayed(run: Path, iteration: int, **changes: Any) -> Dict[str, Any]:
    """Replay an iteration and return what it has written of virtual rank 0."""
    before = {path: path.read_bytes() for path in run.glob('*.*')}
    folder = replay(toy_config(run, **dict(changes, runner_type='MapSageRunner')), iteration)
    assert folder == run / 'replay' / f'iter_{iteration}'
    assert before == {path: path.read_bytes() for path in run.glob('*.*')}
    assert not list(folder.glob('**/iter_*.pth')) and not (folder / 'last_checkpoint').exists()
    return torch.load(str(folder / 'rank_0.pth'))  # with its defaults


@pytest.mark.parametrize(
    'iteration, changes',
    [
        (5, {}),
        (8, {}),
        (6, EPOCHS),
        (9, EPOCHS),
        (6, {'optim_wrapper.accumulative_counts': 3}),
        (7, {'optim_wrapper': dict(type='AmpOptimWrapper', optimizer=dict(type='SGD', lr=0.05))}),
        (7, {'train_dataloader.num_workers': 1}),
        (
            7,
            {
                'custom_hooks': [
                    dict(type='CheckpointHook', by_epoch=False, interval=1),
                    dict(type='EMAHook', update_buffers=True),
                ]
            },
        ),
    ],
)
def test_a_replayed_iteration_has_the_numbers_of_the_run(
    iteration: int, changes: Any, tmp_path: Path
) -> None:
    changes = dict(changes, param_scheduler=SCHEDULE)
    _, seen = toy_train(tmp_path, **changes)
    told = replayed(tmp_path, iteration, **changes)
    assert told['losses']['loss'] == seen.losses[iteration - 1]
    assert told['learning_rate']['lr'][0] == seen.rates[iteration - 1]
    samples = told['batch']['data_samples']
    assert [each['metainfo']['number'] for each in samples] == seen.samples[iteration - 1]
    assert [each['metainfo']['sample_key'][0] for each in samples] == seen.samples[iteration - 1]
    assert 'bit for bit' in (tmp_path / 'replay' / f'iter_{iteration}' / 'step.txt').read_text()


def test_gradient_norms_are_those_of_the_loss(tmp_path: Path) -> None:
    runner, _ = toy_train(tmp_path, **{'train_cfg.max_iters': 4, 'model.dropout': 0.0})
    told = replayed(tmp_path, 5, **{'model.dropout': 0.0})
    model = runner.model.train()
    model.zero_grad()
    batch = told['batch']
    values = model.layers(torch.stack(batch['inputs']))[:, 0]
    target = torch.cat([each['target'] for each in batch['data_samples']])
    (((values - target) ** 2).mean() / 100).backward()
    assert told['gradient_norms'] == {
        name: each.grad.double().norm().item() for name, each in model.named_parameters()
    }


@pytest.mark.skipif(not HAS_SCALER, reason='this torch scales losses on cuda only')
def test_gradient_norms_are_without_the_factor_of_the_loss_scaler(tmp_path: Path) -> None:
    wrapper = {'optim_wrapper.type': 'ScaledOnCpu'}
    toy_train(tmp_path / 'plain', **{'train_cfg.max_iters': 4})
    toy_train(tmp_path / 'scaled', **{'train_cfg.max_iters': 4, **wrapper})
    plain_run = replayed(tmp_path / 'plain', 5)
    scaled = replayed(tmp_path / 'scaled', 5, **wrapper)
    assert plain_run['gradient_norms'] == scaled['gradient_norms']


@HOOKS.register_module(force=True)
class Poison(Hook):
    """Makes a weight NaN at an iteration, or raises an error in it."""

    priority = 'VERY_LOW'

    def __init__(self, at: int, fails: bool = False) -> None:
        self.at, self.fails = at, fails

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter + 1 == self.at:
            if self.fails:
                data_batch['inputs'].append(torch.zeros(3))
            runner.model.layers[4].weight.data.fill_(float('nan'))


def test_a_run_that_died_of_nan_says_how_to_see_it_again(tmp_path: Path) -> None:
    changes = {'custom_hooks': [dict(type='Poison', at=6)]}
    with pytest.raises(NonFiniteLossError, match=f'--work-dir {tmp_path} --replay 6'):
        toy_train(tmp_path, **changes)
    told = replayed(tmp_path, 6, **changes)
    assert told['losses']['loss'] != told['losses']['loss']
    text = (tmp_path / 'replay' / 'iter_6' / 'step.txt').read_text()
    assert 'nan' in text and 'the first is layers.4.bias' in text


def test_a_replay_is_not_advised_without_a_checkpoint_in_the_work_dir(tmp_path: Path) -> None:
    toy_train(tmp_path / 'first')
    changes = {
        'custom_hooks': [dict(type='Poison', at=6)],
        'resume': True,
        'load_from': str(tmp_path / 'first' / 'iter_4.pth'),
    }
    with pytest.raises(NonFiniteLossError, match='checkpoint: .*first/iter_4.pth') as error:
        toy_train(tmp_path / 'second', **changes)
    assert '--replay' not in str(error.value)


def test_a_step_that_fails_leaves_its_batch(tmp_path: Path) -> None:
    toy_train(tmp_path)
    with pytest.raises(RuntimeError, match='stack expects'):
        replayed(tmp_path, 6, custom_hooks=[dict(type='Poison', at=6, fails=True)])
    told = torch.load(str(tmp_path / 'replay' / 'iter_6' / 'rank_0.pth'))
    assert len(told['batch']['inputs']) == 3 and told['losses'] == {}


def test_other_conditions_are_told(tmp_path: Path) -> None:
    toy_train(tmp_path)
    path = tmp_path / 'iter_4.pth'
    checkpoint = torch.load(str(path), **LOAD)
    facts = checkpoint['meta']['reproducibility'][0]['facts']
    facts.update(torch='1.9.1', threads='2')
    torch.save(checkpoint, str(path))
    threads = torch.get_num_threads()
    replayed(tmp_path, 5)
    text = (tmp_path / 'replay' / 'iter_5' / 'step.txt').read_text()
    assert 'close to its numbers, not equal' in text and 'torch: 1.9.1, now' in text
    assert 'threads' not in text and torch.get_num_threads() == 2  # as many as the run had
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    'iteration, changes, message',
    [
        (4, {}, r'no checkpoint from before that iteration.*iter_4\.pth'),
        (9, {}, 'the run has 8 iterations'),
        (0, {}, 'from 1 on'),
        (5, {'launcher': 'pytorch'}, 'without a launcher'),
    ],
)
def test_what_cannot_be_replayed(
    iteration: int, changes: Any, message: str, tmp_path: Path
) -> None:
    toy_train(tmp_path)
    cfg = toy_config(tmp_path)
    cfg.merge_from_dict(dict(changes, runner_type='MapSageRunner'))
    with pytest.raises(ReplayError, match=message):
        replay(cfg, iteration)


def test_a_checkpoint_that_does_not_name_its_virtual_ranks(tmp_path: Path) -> None:
    _, seen = toy_train(tmp_path)
    path = tmp_path / 'iter_4.pth'
    checkpoint = torch.load(str(path), **LOAD)
    del checkpoint['meta']['virtual_ranks']
    torch.save(checkpoint, str(path))
    with pytest.raises(ReplayError, match='env_cfg.virtual_ranks=N'):
        replayed(tmp_path, 5)
    told = replayed(tmp_path, 5, **{'env_cfg.virtual_ranks': 1})
    assert told['losses']['loss'] == seen.losses[4]


def test_an_empty_work_dir_and_a_broken_checkpoint_are_told(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match='none at all'):
        replay(toy_config(tmp_path / 'none'), 5)
    (tmp_path / 'iter_3.pth').write_bytes(b'no checkpoint')
    with pytest.raises(ReplayError, match=r'iter_3\.pth \(cannot be read'):
        replay(toy_config(tmp_path), 5)


def test_any_batch_becomes_what_torch_loads(tmp_path: Path) -> None:
    import collections

    import numpy as np

    Pair = collections.namedtuple('Pair', 'left right')
    batch = Pair(
        {'a': np.float32(0.5), 3: np.ones(2, np.uint8), 'text': np.array('x')},
        [Path('file'), object, None, torch.nn.Parameter(torch.ones(1)), True],
    )
    torch.save(plain(batch), str(tmp_path / 'batch.pth'))
    left, right = torch.load(str(tmp_path / 'batch.pth'))
    assert left == {'a': 0.5, '3': left['3'], 'text': 'x'} and left['3'].tolist() == [1, 1]
    assert right == ['file', repr(object), None, right[3], True] and not right[3].requires_grad
