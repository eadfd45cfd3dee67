"""A model over 1 to 4 simulated devices: losses, gradients, memory, and what moves between them."""

from __future__ import annotations

import copy
import functools
import gc
import tempfile
import traceback
from collections import namedtuple
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import pytest
import torch
from mmengine.model import BaseModel, revert_sync_batchnorm
from ranks import run_ranks
from small_segmentors import (
    SIDE,
    SMALL_SEGMENTORS,
    batch,
    resnet_fcn,
    resnet_fcn_all_losses,
    segformer,
    vit_upernet,
)
from support import no_simulated_cards
from torch import nn

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed.wrappers import (
    AmpOptimWrapper,
    CrossDeviceError,
    MMModelParallel,
    OptimWrapper,
)

pytestmark = pytest.mark.skipif(
    no_simulated_cards() is not None, reason=f'sim: {no_simulated_cards()}'
)

CHECKS: Dict[str, Callable[[], Any]] = {}


def in_process(check: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[check.__name__] = check
    return check


# --- what runs in a separate process, on simulated devices ------------------------------------


def held() -> List[int]:
    """Bytes of tensors on each of the first four simulated devices."""
    gc.collect()
    return [torch.gcu.memory_allocated(index) for index in range(4)]


def train_and_predict(build: Callable[[], nn.Module], wrap: Optional[Callable[..., Any]]) -> Any:
    """Two steps of AdamW with clipped gradients, and a prediction.

    Returns:
        The losses of both steps, the first gradients, the weights at the end, the logits, the
        devices of predictions and labels, and the bytes of weights on each device.
    """
    model = build()
    wrapped = wrap(model) if wrap else revert_sync_batchnorm(model)
    weight_bytes = held() if wrap else []
    gradients: Dict[str, torch.Tensor] = {}

    class Recording(OptimWrapper):
        def step(self, **kwargs: Any) -> None:
            if not gradients:
                gradients.update(
                    {
                        name: parameter.grad.cpu().clone()
                        for name, parameter in model.named_parameters()
                        if parameter.grad is not None
                    }
                )
            super().step(**kwargs)

    # A large eps: with the default, a gradient that is rounding alone gets a step of full length.
    optimizer = Recording(
        torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3), clip_grad=dict(max_norm=0.5)
    )
    losses = []
    wrapped.train()
    for _ in range(2):
        logged = wrapped.train_step(batch(), optimizer)
        losses.append({name: float(value) for name, value in logged.items()})
    wrapped.eval()
    with torch.no_grad():
        predicted = wrapped.val_step(batch())
    logits = torch.stack([sample.seg_logits.data.cpu() for sample in predicted])
    devices = {
        str(tensor.device)
        for sample in predicted
        for tensor in (sample.seg_logits.data, sample.pred_sem_seg.data, sample.gt_sem_seg.data)
    }
    weights = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    return dict(
        losses=losses,
        gradients=gradients,
        logits=logits,
        devices=devices,
        weights=weights,
        weight_bytes=weight_bytes,
    )


def over(count: int) -> Callable[[nn.Module], MMModelParallel]:
    return lambda model: MMModelParallel(model, devices=list(range(count)))


def run_model(name: str) -> Dict[Any, Any]:
    """Train the model on the CPU and over 1 to 4 devices."""
    set_current_accelerator(resolve_accelerator('cpu'))
    found: Dict[Any, Any] = dict(cpu=train_and_predict(SMALL_SEGMENTORS[name], None))
    set_current_accelerator(resolve_accelerator('sim'))
    for count in (1, 2, 3, 4):
        assert held() == [0] * 4
        for index in range(4):
            torch.gcu.reset_peak_memory_stats(index)
        found[count] = train_and_predict(SMALL_SEGMENTORS[name], over(count))
        found[count]['peaks'] = [torch.gcu.max_memory_allocated(index) for index in range(4)]
    return found


class Copies(
    getattr(
        getattr(torch.utils, '_python_dispatch', None),  # not in torch 1.10
        'TorchDispatchMode',
        object,
    )
):  # type: ignore[misc]
    """Lists the shapes that are copied from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: List[Sequence[int]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and result.device != args[0].device:
            self.moved.append(tuple(result.shape))
        return result


@in_process
def only_what_crosses_moves() -> None:
    split = {'': 'gcu:0', 'backbone.layer4': 1, 'decode_head': 1, 'auxiliary_head': 1}
    wrapped = MMModelParallel(resnet_fcn(), split, devices=[0, 1])
    data = wrapped.module.data_preprocessor(batch(), True)
    with Copies() as copies:
        wrapped(**data, mode='loss')
    stride = SIDE // 8
    labels = [(1, SIDE, SIDE)] * 2
    # layer3's output is layer4's input and the auxiliary head's; layer4's is where it is needed,
    # nobody asked for layer1's and layer2's. Two heads need the labels of two images.
    assert sorted(copies.moved) == sorted([(2, 32, stride, stride)] * 2 + labels * 2), copies.moved


@in_process
def nothing_moves_on_one_device() -> None:
    wrapped = MMModelParallel(vit_upernet(), devices=['gcu:2'])
    data = wrapped.module.data_preprocessor(batch(), True)
    with Copies() as copies:
        wrapped(**data, mode='loss')
    assert copies.moved == []
    assert {str(tensor.device) for tensor in wrapped.state_dict().values()} == {'gcu:2'}


@in_process
def every_tensor_is_where_the_map_says() -> None:
    wrapped = MMModelParallel(vit_upernet(), devices=[0, 1, 2])
    assert list(map(str, wrapped.devices)) == ['gcu:0', 'gcu:1', 'gcu:2']
    for name, tensor in wrapped.module.state_dict().items():
        path = name
        while path not in wrapped.device_map:
            path = path.rpartition('.')[0]
        assert tensor.device == wrapped.device_map[path], name
    assert {str(device) for device in wrapped.device_map.values()} == {'gcu:0', 'gcu:1', 'gcu:2'}
    assert str(wrapped.input_device) == str(wrapped.module.data_preprocessor.device) == 'gcu:0'
    # What was decided can be asked for.
    again = MMModelParallel(vit_upernet(), wrapped.device_map, devices=[0, 1, 2])
    assert again.device_map == wrapped.device_map


@in_process
def a_head_may_be_cut() -> Any:
    split = {'': 0, 'decode_head.conv_seg': 'gcu:1', 'auxiliary_head': 2}
    results = [
        train_and_predict(resnet_fcn_all_losses, wrap)
        for wrap in (over(1), lambda model: MMModelParallel(model, split, devices=[0, 1, 2]))
    ]
    assert_same(*results)


@in_process
def sliding_windows() -> None:
    def build() -> nn.Module:
        model = segformer()
        model.test_cfg.update(mode='slide', crop_size=(32, 32), stride=(24, 24))
        return model

    assert_same(train_and_predict(build, over(1)), train_and_predict(build, over(3)))


@in_process
def augmented_predictions() -> None:
    from mmseg.models import SegTTAModel

    predictions = []
    for count in (1, 3):
        model = segformer().eval()
        wrapped = MMModelParallel(SegTTAModel(module=model), devices=list(range(count)))
        data = {key: [value, value] for key, value in batch().items()}
        data = {key: [each[:1] for each in value] for key, value in data.items()}
        with torch.no_grad():
            predictions.append(wrapped.test_step(data)[0].pred_sem_seg.data.cpu())
        assert len({str(p.device) for p in model.parameters()}) == count
    assert torch.equal(*predictions)


@in_process
def a_deep_copy_is_independent() -> None:
    wrapped = MMModelParallel(segformer(), devices=[0, 1, 2]).eval()
    data = wrapped.module.data_preprocessor(batch(), False)
    with torch.no_grad():
        before = wrapped(**data).cpu()
        copied = copy.deepcopy(wrapped.module)  # as EMAHook does
        for parameter in wrapped.parameters():
            parameter.zero_()
        assert torch.equal(copied(**data).cpu(), before)
        assert not torch.equal(wrapped(**data).cpu(), before)


@in_process
def splitting_again_replaces_the_split() -> None:
    model = segformer().eval()
    with torch.no_grad():
        outputs = [
            over(count)(model)(**model.data_preprocessor(batch(), False)).cpu()
            for count in (1, 4, 2)
        ]
    assert torch.allclose(outputs[0], outputs[1], atol=1e-6)
    assert torch.equal(outputs[0], outputs[2])


@in_process
def a_cut_through_a_sum_is_explained() -> str:
    split = {'': 0, 'backbone.layer2.0.bn2': 1}
    wrapped = MMModelParallel(resnet_fcn(), split, devices=[0, 1])
    optimizer = OptimWrapper(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    error = error_of(lambda: wrapped.train_step(batch(), optimizer))
    assert isinstance(error, CrossDeviceError)
    assert 'same device' in str(error.__cause__)
    return str(error)


@in_process
def an_error_of_a_whole_part_is_left_alone() -> str:
    class Careless(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) + torch.ones(4, device='gcu:0')

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.head = Careless(4, 4)

        def forward(self, inputs: torch.Tensor, mode: str = 'tensor') -> Any:
            return self.head(self.layer(inputs))

    wrapped = MMModelParallel(Model(), {'layer': 0, 'head': 1}, devices=[0, 1])
    error = error_of(lambda: wrapped(torch.ones(2, 4)))
    assert 'same device' in str(error)
    return type(error).__name__


@in_process
def nested_and_keyword_arguments_move() -> None:
    Pair = namedtuple('Pair', 'first second')

    class Adding(nn.Linear):
        def forward(self, pair: Pair, more: Dict[str, Any]) -> torch.Tensor:
            assert more['nothing'] is None and isinstance(pair, Pair)
            return super().forward(pair.first + pair.second[0] + more['more'])

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.head = Adding(4, 4)

        def forward(self, inputs: torch.Tensor, mode: str = 'tensor') -> Any:
            inputs = self.layer(inputs)
            return self.head(Pair(inputs, [inputs]), more=dict(more=inputs, nothing=None))

    model = Model()
    inputs = torch.ones(2, 4)
    expected = model(inputs)
    found = MMModelParallel(model, {'layer': 0, 'head': 1}, devices=[0, 1])(inputs)
    assert str(found.device) == 'gcu:1'
    torch.testing.assert_close(found.cpu(), expected)


@in_process
def tied_weights_stay_tied() -> None:
    class Tied(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
            self.backbone[4].weight = self.backbone[0].weight

        def forward(self, inputs: torch.Tensor, mode: str = 'tensor') -> Any:
            return dict(loss=self.backbone(inputs).sum())

    model = Tied()
    bare = copy.deepcopy(model)
    wrapped = MMModelParallel(model, devices=[0, 1, 2])
    assert model.backbone[4].weight is model.backbone[0].weight
    assert len({parameter.device for parameter in model.parameters()}) > 1
    inputs = torch.ones(2, 4)
    wrapped(inputs)['loss'].backward()
    bare(inputs)['loss'].backward()
    for parameter, other in zip(model.parameters(), bare.parameters()):
        assert torch.allclose(parameter.grad.cpu(), other.grad)


@in_process
def devices_are_checked() -> None:
    for devices in ([], [0, 0]):
        error = error_of(lambda devices=devices: MMModelParallel(segformer(), devices=devices))
        assert isinstance(error, ValueError) and 'each of them once' in str(error)
    assert len(MMModelParallel(segformer()).devices) == 8


@in_process
def gradients_accumulate() -> None:
    states = []
    for count in (1, 3):
        model = segformer()
        wrapped = over(count)(model)
        optimizer = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=2)
        for _ in range(4):
            wrapped.train_step(batch(), optimizer)
        states.append({name: value.cpu() for name, value in model.state_dict().items()})
    assert all(torch.allclose(states[0][name], states[1][name], atol=1e-5) for name in states[0])


def error_of(action: Callable[[], Any]) -> Optional[Exception]:
    try:
        action()
    except Exception as error:
        return error
    return None


@in_process
def mixed_precision() -> None:
    for dtype in ('bfloat16', 'float16'):  # the latter with a gradient scaler
        found = []
        for count in (1, 3):
            model = segformer()
            wrapped = over(count)(model)
            optimizer = AmpOptimWrapper(
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1), dtype=dtype, loss_scale=64.0
            )
            found.append([float(wrapped.train_step(batch(), optimizer)['loss']) for _ in range(3)])
        assert found[0] == pytest.approx(found[1], rel=2e-2)
        assert found[0][2] < found[0][0]


@in_process
def an_accelerator_and_the_cpu() -> None:
    # what a machine with a single card can do
    split = {'': 'gcu:0', 'decode_head': 'cpu'}
    result = train_and_predict(
        vit_upernet, lambda model: MMModelParallel(model, split, devices=['gcu:0', 'cpu'])
    )
    assert result['devices'] == {'cpu'}
    assert_same(result, train_and_predict(vit_upernet, over(1)))


def run_all(kind: str) -> Dict[str, Any]:
    """Return what every check, or every model, came to: what it returned, or a traceback."""
    set_current_accelerator(resolve_accelerator('sim'))
    jobs = (
        CHECKS
        if kind == 'checks'
        else {name: functools.partial(run_model, name) for name in SMALL_SEGMENTORS}
    )
    found = {}
    for name, job in jobs.items():
        try:
            found[name] = ('passed', job())
        except Exception:
            found[name] = ('failed', traceback.format_exc())
    return found


# --- the tests: what those processes found ------------------------------------------------------


@functools.lru_cache(maxsize=None)
def on_sim(kind: str) -> Any:
    """Run all of a kind, once, in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run_ranks(run_all, 1, Path(folder), kind, timeout=300)[0]
        except AssertionError as error:
            return str(error)


def outcome(kind: str, name: str) -> Any:
    found = on_sim(kind)
    assert isinstance(found, dict), found
    verdict, said = found[name]
    assert verdict == 'passed', said
    return said


def assert_same(result: Any, reference: Any) -> None:
    """Equal to float32 rounding."""
    for ours, theirs in zip(result['losses'], reference['losses']):
        for name, value in ours.items():
            # an accuracy is a count: rounding may decide three pixels of two images
            pixels = 3 * 100 / (2 * SIDE * SIDE) if 'acc' in name else 1e-5
            assert value == pytest.approx(theirs[name], rel=1e-4, abs=pixels), name
    assert result['gradients'].keys() == reference['gradients'].keys() != set()
    for name, gradient in result['gradients'].items():
        torch.testing.assert_close(
            gradient,
            reference['gradients'][name],
            rtol=1e-3,
            atol=2e-5,
            msg=lambda text, name=name: f'{name}: {text}',
        )
    torch.testing.assert_close(result['logits'], reference['logits'], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('count', [2, 3, 4])
@pytest.mark.parametrize('name', SMALL_SEGMENTORS)
def test_losses_and_gradients_equal_one_devices(name: str, count: int) -> None:
    found = outcome('models', name)
    assert_same(found[count], found[1])
    assert_same(found[count], found['cpu'])
    assert found[count]['weights'].keys() == found['cpu']['weights'].keys()
    assert len(found[count]['devices']) == 1, 'logits, predictions and labels lie apart'


@pytest.mark.parametrize('name', SMALL_SEGMENTORS)
def test_each_device_holds_less(name: str) -> None:
    found = outcome('models', name)
    whole = found[1]['weight_bytes'][0]
    assert found[1]['weight_bytes'][1:] == [0, 0, 0]
    for count in (2, 3, 4):
        weights, peaks = found[count]['weight_bytes'], found[count]['peaks']
        assert all(0 < each < whole for each in weights[:count])
        assert weights[count:] == [0] * (4 - count)
        assert max(peaks) < found[1]['peaks'][0]
    assert max(found[4]['weight_bytes']) < max(found[2]['weight_bytes'])


@pytest.mark.parametrize('check', CHECKS)
def test_on_simulated_devices(check: str) -> None:
    outcome('checks', check)


def test_the_explanation_names_the_module_and_the_way_out() -> None:
    said = outcome('checks', 'a_cut_through_a_sum_is_explained')
    assert 'backbone.layer2.0 (BasicBlock) combines tensors of its parts' in said
    assert 'gcu:0, gcu:1' in said
    assert "gives 'backbone.layer2.0' one" in said
    assert 'Expected all tensors to be on the same device' in said


def test_a_foreign_error_keeps_its_type() -> None:
    assert outcome('checks', 'an_error_of_a_whole_part_is_left_alone') == 'RuntimeError'
