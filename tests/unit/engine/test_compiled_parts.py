"""``compile=dict(backbone=True)`` compiles these modules, and changes nothing else."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from mask_models import build, eomt_config, labels_of, losses_of, pmt_config
from ranks import run_ranks
from support import main_leg
from torch import nn
from toy_runs import ToyRegression, log_of, same_weights, toy_runner, toy_train

from mapsage.accelerator.gcu import GcuAccelerator
from mapsage.accelerator.xla import XlaAccelerator
from mapsage.engine.compiled_parts import CompileError, check_parts, compile_parts, compiled_parts

without_compile = pytest.mark.skipif(hasattr(torch, 'compile'), reason='this torch compiles')
LAYERS: Dict[str, Any] = dict(layers=True, backend='eager')


@pytest.mark.parametrize(
    'setting, parts',
    [
        (None, []),
        (True, []),
        (False, []),
        (dict(), []),
        (dict(backend='eager', mode=None), []),
        (dict(backbone=True), ['backbone']),
        (
            dict(backbone=False, decode_head=dict(dynamic=True), fullgraph=True),
            ['backbone', 'decode_head'],
        ),
    ],
)
def test_keys_that_are_no_options_of_torch_are_modules(setting: Any, parts: list) -> None:
    assert compiled_parts(setting) == parts


@main_leg
@pytest.mark.parametrize(
    'setting, words',
    [
        (
            dict(backbone=True),
            "ToyRegression has no module 'backbone'. It has data_preprocessor, "
            'layers, and modules in these',
        ),
        ({'layers.7': True}, "no module 'layers.7'"),
        ({'layers.0': True, 'bias': False}, "no module 'bias'"),
        (dict(layers='max-autotune'), "layers is 'max-autotune', expected True, False, or a dict"),
        (
            dict(layers=dict(back='eager')),
            'expected True, False, or a dict of arguments of torch.compile: backend, ',
        ),
    ],
)
def test_what_is_no_module_or_no_setting(setting: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=words):
        toy_train(tmp_path, compile=setting)


@main_leg
@pytest.mark.parametrize('kind', [GcuAccelerator, XlaAccelerator])
def test_a_device_without_a_code_generator(kind: Any) -> None:
    accelerator, model = kind.__new__(kind), ToyRegression()  # as where such a device is
    check_parts(model, dict(layers=False), accelerator)
    check_parts(model, LAYERS, accelerator)
    check_parts(model, dict(layers=dict(backend='eager')), accelerator)
    with pytest.raises(CompileError, match=f'no code for {kind.name}. Name one'):
        check_parts(model, dict(layers=True, dynamic=False), accelerator)


@without_compile
def test_a_torch_without_compile_refuses_as_mmengine_does(tmp_path: Path) -> None:
    runner, _ = toy_runner(tmp_path, compile=dict(layers=True))
    with pytest.raises(
        CompileError,
        match=re.escape(
            f'torch {torch.__version__}, and torch.compile came with 2.0. Take `compile` out'
        ),
    ):
        runner.train()
    runner.test()
    with pytest.raises(AssertionError, match='PyTorch >= 2.0.0 is required'):
        toy_train(tmp_path / 'stock', compile=True)
    toy_train(tmp_path / 'none', compile=dict(layers=False))


@main_leg
def test_mmengines_own_settings_stay_its_own(tmp_path: Path) -> None:
    runner, _ = toy_train(tmp_path, compile=dict(backend='eager', disable=True))
    assert 'train_step' in vars(runner.model) and 'forward' not in vars(runner.model.layers)
    assert 'Model has been "compiled"' in log_of(runner)


@main_leg
def test_a_run_ends_with_the_same_bits_and_the_same_names(tmp_path: Path) -> None:
    """Also with a moving average, and resumed from a checkpoint that was not compiled."""
    average = dict(custom_hooks=[dict(type='EMAHook'), dict(type='DeviceCheckHook', interval=0)])
    plain, expected = toy_train(tmp_path / 'plain', **average)
    runner, record = toy_train(tmp_path / 'parts', compile=LAYERS, **average)
    assert record.losses == expected.losses and record.figures == expected.figures
    assert 'forward' in vars(runner.model.layers)
    assert 'compile: layers (Sequential.forward), at the first steps' in log_of(runner)
    assert 'TORCH_LOGS=graph_breaks,recompiles says' in log_of(runner)
    wanted, found = (
        torch.load(tmp_path / each / 'iter_8.pth', weights_only=False)
        for each in ('plain', 'parts')
    )
    for key in ('state_dict', 'ema_state_dict'):
        assert same_weights(wanted[key], found[key])
    resumed, record = toy_train(
        tmp_path / 'plain',
        resume=True,
        load_from=str(tmp_path / 'plain' / 'iter_4.pth'),
        compile=LAYERS,
        **average,
    )
    assert record.losses == expected.losses[4:]
    assert same_weights(resumed.model.state_dict(), plain.model.state_dict())


def train_compiled(folder: Path) -> Any:
    """Train with as many virtual ranks as processes, under torch's DDP, and with more."""
    torch.set_num_threads(1)
    found = []
    for count in (3, 5):
        runner, record = toy_train(
            folder / os.environ['RANK'] / str(count),
            compile=LAYERS,
            **{'env_cfg.reduction': 'ordered', 'env_cfg.virtual_ranks': count},
        )
        model = runner.model.module
        assert 'forward' in vars(model.layers)
        found.append((type(runner.model).__name__, record.losses, model.state_dict()))
    return found


@main_leg
def test_ranks_and_virtual_ranks_have_the_bits_of_the_plain_step(tmp_path: Path) -> None:
    answers = run_ranks(train_compiled, 3, tmp_path / 'ranks', tmp_path)
    for at, (count, wrapper) in enumerate(
        {3: 'MMDistributedDataParallel', 5: 'VirtualDataParallel'}.items()
    ):
        runner, record = toy_train(
            tmp_path / 'plain' / str(count), **{'env_cfg.virtual_ranks': count}
        )
        assert answers[1][at][0] == wrapper and answers[0][at][1] == record.losses
        weights = {
            name: value
            for name, value in runner.model.module.state_dict().items()
            if 'running' not in name
        }  # those of a rank's own batches
        found = answers[1][at][2]
        assert same_weights(weights, {name: found[name] for name in weights}), wrapper


def vit_config(**backbone: Any) -> Dict[str, Any]:
    config = pmt_config()
    config['backbone'].update(prefix_tokens=False, drop_path_rate=0.2, **backbone)
    config['decode_head'] = dict(
        type='LinearHead',
        in_channels=32,
        in_index=3,
        channels=32,
        num_classes=5,
        norm_cfg=dict(type='BN'),
        align_corners=False,
    )
    return config


MODELS = {
    'eomt': eomt_config(),
    'frozen pmt': pmt_config(),
    'lora': vit_config(lora=dict(rank=2, targets=('q', 'v'))),
    'recomputed': vit_config(frozen=False, with_cp=True),
}


@main_leg
@pytest.mark.parametrize('kind', list(MODELS))
def test_segmentors_compile_without_a_break_to_the_same_bits(kind: str) -> None:
    torch._dynamo.reset()  # models before this one have compiled the same functions
    plain, model = build(MODELS[kind]), build(MODELS[kind])
    compile_parts(model, dict(backbone=True, decode_head=True, backend='eager'))
    assert list(model.state_dict()) == list(plain.state_dict())
    from torch._dynamo.utils import counters

    counters.clear()
    labels = labels_of(2)
    for step in range(3):
        outcomes = []
        for each in (plain, model):
            each.zero_grad(set_to_none=True)
            torch.manual_seed(step)
            loss, _ = each.parse_losses(losses_of(each, labels, seed=step))
            loss.backward()
            outcomes.append(
                (
                    loss,
                    {
                        name: parameter.grad
                        for name, parameter in each.named_parameters()
                        if parameter.grad is not None
                    },
                )
            )
        assert torch.equal(outcomes[0][0], outcomes[1][0]), step
        assert same_weights(outcomes[0][1], outcomes[1][1]), step
    # A recompilation would be one more graph.
    assert counters['stats']['unique_graphs'] == 2 and not counters['graph_break'], counters


@main_leg
def test_a_copy_computes_with_its_own_weights() -> None:
    model = nn.Sequential()
    model.add_module('layers', nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    assert compile_parts(model, LAYERS) == ['layers (Linear.forward)']
    assert compile_parts(model, LAYERS) == ['layers (Linear.forward)']  # a second train()
    x = torch.ones(1, 2)
    first, second = model.layers  # type: ignore[misc]
    outputs = first(x), second(x)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.layers[0].weight.zero_()  # type: ignore[index]
        twin.layers[0].bias.zero_()  # type: ignore[index]
    assert torch.equal(first(x), outputs[0]) and torch.equal(second(x), outputs[1])
    assert not twin.layers[0](x).any()  # type: ignore[index]
