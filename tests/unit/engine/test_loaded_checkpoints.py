"""A run refuses a checkpoint of another model, where MMEngine logs it and continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from mmengine.registry import MODELS
from torch import nn
from toy_runs import ToyRegression, log_of, toy_runner, toy_train

from mapsage.models.checkpoint_fit import CheckpointFitError

LOAD = {'weights_only': False} if torch.__version__ >= '2' else {}


@MODELS.register_module(force=True)
class ToyDeeper(ToyRegression):
    """The toy model with another output layer and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[4] = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 1))


@MODELS.register_module(force=True)
class ToyStranger(ToyRegression):
    """A model that has the toy model's layers by other names."""

    def __init__(self) -> None:
        super().__init__()
        self.others, self.layers = self.layers, nn.Identity()

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        self.layers = self.others
        return super().forward(inputs, data_samples, mode)


DEEPER = dict(model=dict(type='ToyDeeper'))
STRANGER = dict(model=dict(type='ToyStranger'))


@pytest.fixture(scope='module')
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a checkpoint of the toy model after 8 iterations."""
    folder = tmp_path_factory.mktemp('trained')
    toy_train(folder)
    return folder / 'iter_8.pth'


def change(trained: Path, path: Path, **changes: Any) -> str:
    """Write the checkpoint with other values and return its path."""
    checkpoint = torch.load(str(trained), **LOAD)
    checkpoint.update(changes)
    torch.save(checkpoint, str(path))
    return str(path)


def weights_of(trained: Path) -> Dict[str, Any]:
    return torch.load(str(trained), **LOAD)['state_dict']


@pytest.mark.parametrize('what', ['test', 'val'])
@pytest.mark.parametrize('model', [DEEPER, STRANGER], ids=['deeper', 'stranger'])
def test_a_test_needs_the_whole_model(
    what: str, model: Dict[str, Any], trained: Path, tmp_path: Path
) -> None:
    runner, record = toy_runner(tmp_path, load_from=str(trained), **model)
    before = {name: tensor.clone() for name, tensor in runner.model.state_dict().items()}
    with pytest.raises(CheckpointFitError, match=r'iter_8\.pth does not fit .* missing: '):
        getattr(runner, what)()
    assert record.figures == []
    assert all(
        torch.equal(before[name], tensor) for name, tensor in runner.model.state_dict().items()
    )


def test_a_resumed_training_needs_the_whole_model(trained: Path, tmp_path: Path) -> None:
    runner, record = toy_runner(tmp_path, load_from=str(trained), resume=True, **DEEPER)
    with pytest.raises(CheckpointFitError, match='does not fit'):
        runner.train()
    assert record.losses == []


@pytest.mark.parametrize('what', ['test', 'train'])
def test_the_prefix_of_a_wrapper_is_removed(what: str, trained: Path, tmp_path: Path) -> None:
    path = change(
        trained,
        tmp_path / 'a.pth',
        state_dict={f'module.{name}': tensor for name, tensor in weights_of(trained).items()},
    )
    changes: Dict[str, Any] = (
        dict(resume=True, **{'train_cfg.max_iters': 10}) if what == 'train' else {}
    )
    runner, record = toy_runner(tmp_path / 'work', load_from=path, **changes)
    getattr(runner, what)()
    other, reference = toy_runner(tmp_path / 'plain', load_from=str(trained), **changes)
    getattr(other, what)()
    assert record.figures == reference.figures != []
    assert record.losses == reference.losses


@pytest.mark.parametrize('how', ['test', 'resume', 'load_from'])
def test_the_prefix_of_an_average_is_named(how: str, trained: Path, tmp_path: Path) -> None:
    path = change(
        trained,
        tmp_path / 'a.pth',
        state_dict={f'model_ema.{name}': tensor for name, tensor in weights_of(trained).items()},
    )
    runner, _ = toy_runner(tmp_path / 'work', load_from=path, resume=how == 'resume')
    with pytest.raises(CheckpointFitError, match="begin with 'model_ema.', without which they fit"):
        runner.test() if how == 'test' else runner.train()


def test_a_training_may_begin_with_a_part_and_says_so(trained: Path, tmp_path: Path) -> None:
    runner, record = toy_train(tmp_path, load_from=str(trained), **DEEPER)
    assert len(record.losses) == 8
    assert (
        'iter_8.pth fills 7 of the 11 weights of the model; 4 missing: layers.4.0.weight, '
        in log_of(runner)
    )


def test_a_training_does_not_begin_with_another_model(trained: Path, tmp_path: Path) -> None:
    runner, record = toy_runner(tmp_path, load_from=str(trained), **STRANGER)
    with pytest.raises(CheckpointFitError, match='nothing in common .* 0 of its 9 weights fit'):
        runner.train()
    assert record.losses == []


def test_a_whole_checkpoint_needs_no_warning(trained: Path, tmp_path: Path) -> None:
    runner, _ = toy_train(tmp_path, load_from=str(trained))
    assert 'weights of the model;' not in log_of(runner)


def test_an_average_is_loaded_where_the_config_has_the_hook(tmp_path: Path) -> None:
    average = dict(custom_hooks=[dict(type='EMAHook')])
    toy_train(tmp_path, **average)
    for changes in (average, {}):
        runner, record = toy_runner(
            tmp_path / 'test', load_from=str(tmp_path / 'iter_8.pth'), **changes
        )
        runner.test()
        assert len(record.figures) == 1


def test_weights_are_compared_by_the_names_that_loading_gives_them(
    trained: Path, tmp_path: Path
) -> None:
    checkpoint = torch.load(str(trained), **LOAD)
    checkpoint['state_dict'] = {
        f'student.{name}': weight for name, weight in checkpoint['state_dict'].items()
    }
    torch.save(checkpoint, str(tmp_path / 'student.pth'))
    runner, _ = toy_runner(tmp_path / 'run')
    with pytest.raises(CheckpointFitError, match='student.'):
        runner.load_checkpoint(str(tmp_path / 'student.pth'))
    runner.load_checkpoint(str(tmp_path / 'student.pth'), revise_keys=[(r'^student\.', '')])
    for name, weight in runner.model.state_dict().items():
        assert torch.equal(weight, checkpoint['state_dict'][f'student.{name}'])


@pytest.mark.parametrize('how', ['resume', 'auto', 'test', 'load_from'])
def test_no_text_of_a_checkpoint_is_executed(how: str, trained: Path, tmp_path: Path) -> None:
    mark, work_dir = tmp_path / 'executed', tmp_path / 'work'
    text = f"open({str(mark)!r}, 'w')\ncustom_imports = dict(imports=['antigravity'])\n"
    checkpoint = torch.load(str(trained), **LOAD)
    checkpoint['meta'].update(config=text, cfg=text)
    checkpoint['message_hub']['runtime_info']['cfg'] = text
    work_dir.mkdir()
    torch.save(checkpoint, str(work_dir / 'iter_8.pth'))
    resume: Any = dict(resume=True, auto='auto').get(how, False)
    runner, record = toy_runner(
        work_dir,
        resume=resume,
        load_from=None if how == 'auto' else str(work_dir / 'iter_8.pth'),
        **{'train_cfg.max_iters': 10},
    )
    runner.test() if how == 'test' else runner.train()
    assert len(record.losses) == dict(resume=2, auto=2, load_from=10, test=0)[how]
    assert not mark.exists()


def test_a_link_of_the_names_that_a_run_writes_is_replaced(tmp_path: Path) -> None:
    user, work_dir = tmp_path / 'thesis.txt', tmp_path / 'work'
    user.write_text('years of work')
    toy_train(tmp_path / 'plain')
    names = [path.name for path in (tmp_path / 'plain').iterdir() if path.is_file()]
    config = next(name for name in names if name.endswith('.py'))
    work_dir.mkdir()
    for name in [*names, 'run.py']:
        (work_dir / name).symlink_to(user)
    runner, _ = toy_runner(work_dir)
    # As of a config that was read from a file.
    object.__setattr__(runner.cfg, '_filename', 'somewhere/run.py')
    runner.dump_config()
    runner.train()
    assert user.read_text() == 'years of work'
    assert not any((work_dir / name).is_symlink() for name in ['run.py', *names] if name != config)
