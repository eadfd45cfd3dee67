"""The double's operators: what the CPU computes, bit for bit, on tensors of a CUDA device."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Dict, List, Optional

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

CPU, CUDA = torch.device('cpu'), torch.device('cuda', 1)
On = Callable[[Tensor], Tensor]

_random = torch.Generator().manual_seed(0)
IMAGE = torch.randn(2, 4, 9, 7, generator=_random)
LABELS = torch.randint(0, 4, (2, 9, 7), generator=_random)
FILTERS = torch.randn(8, 4, 3, 3, generator=_random)
MATRIX = torch.randn(6, 6, generator=_random)
POSITIVE = MATRIX @ MATRIX.T + 6 * torch.eye(6)
INDICES = torch.randint(0, 6, (5,), generator=_random)
GRID = IMAGE[:, :2, :, :2].permute(0, 2, 3, 1).contiguous()

# `on` moves a tensor to the device.
CASES: Dict[str, Callable[[On], Any]] = {
    # one number at a time
    'add': lambda on: on(IMAGE) + 1.5,
    'mul': lambda on: on(IMAGE) * on(IMAGE),
    'div': lambda on: on(IMAGE) / 3,
    'sqrt': lambda on: on(IMAGE).abs().sqrt(),
    'exp': lambda on: on(IMAGE).exp(),
    'gelu': lambda on: F.gelu(on(IMAGE)),
    'silu': lambda on: F.silu(on(IMAGE)),
    'clamp': lambda on: on(IMAGE).clamp(-1, 1),
    'lerp': lambda on: on(IMAGE).lerp(on(IMAGE) * 2, 0.3),
    'isnan': lambda on: on(IMAGE).isnan(),
    'where': lambda on: torch.where(on(IMAGE) > 0, on(IMAGE), on(IMAGE) * 2),
    'bfloat16': lambda on: on(IMAGE).bfloat16() * 3,
    'double': lambda on: on(IMAGE).double().pow(3),
    'complex': lambda on: torch.view_as_real(torch.complex(on(MATRIX), on(MATRIX)).conj() * 2),
    'out': lambda on: torch.add(on(IMAGE), 1, out=on(torch.empty(0))),
    'foreach add': lambda on: torch._foreach_add([on(MATRIX), on(IMAGE)], 2.0),
    'foreach norm': lambda on: torch._foreach_norm([on(MATRIX), on(IMAGE)]),
    # reductions and orders
    'sum': lambda on: on(IMAGE).sum((2, 3)),
    'prod': lambda on: on(MATRIX).prod(0),
    'mean': lambda on: on(IMAGE).mean(),
    'var': lambda on: on(IMAGE).var(1),
    'std_mean': lambda on: torch.std_mean(on(IMAGE), (0, 2, 3)),
    'max': lambda on: on(IMAGE).max(1),
    'argmax': lambda on: on(IMAGE).argmax(1),
    'any': lambda on: (on(IMAGE) > 5).any(),
    'softmax': lambda on: on(IMAGE).softmax(1),
    'log_softmax': lambda on: on(IMAGE).log_softmax(1),
    'cumsum': lambda on: on(IMAGE).cumsum(2),
    'topk': lambda on: on(IMAGE).topk(3, 1),
    'sort': lambda on: on(IMAGE).sort(3),
    'quantile': lambda on: on(IMAGE).quantile(0.3),
    'searchsorted': lambda on: torch.searchsorted(on(MATRIX)[0].sort()[0], on(MATRIX)[1]),
    'unique': lambda on: on(INDICES).unique(return_counts=True),
    'bincount': lambda on: on(INDICES).bincount(minlength=9),
    # products and linear algebra
    'matmul': lambda on: on(MATRIX) @ on(MATRIX),
    'matmul float16': lambda on: on(MATRIX).half() @ on(MATRIX).half(),
    'bmm': lambda on: on(IMAGE)[:, 0] @ on(IMAGE)[:, 0].transpose(1, 2),
    'linear': lambda on: F.linear(on(MATRIX), on(MATRIX), on(MATRIX)[0]),
    'einsum': lambda on: torch.einsum('bchw,dc->bdhw', on(IMAGE), on(MATRIX)[:, :4]),
    'cdist': lambda on: torch.cdist(on(MATRIX), on(MATRIX)),
    'solve': lambda on: torch.linalg.solve(on(POSITIVE), on(MATRIX)),
    'svdvals': lambda on: torch.linalg.svdvals(on(MATRIX)),
    'inverse': lambda on: on(POSITIVE).inverse(),
    'cholesky': lambda on: torch.linalg.cholesky(on(POSITIVE)),
    'fft': lambda on: torch.fft.rfft2(on(IMAGE)).abs(),
    # networks
    'conv2d': lambda on: F.conv2d(on(IMAGE), on(FILTERS), padding=1, stride=2),
    'conv_transpose2d': lambda on: F.conv_transpose2d(on(IMAGE), on(FILTERS).transpose(0, 1)),
    'depthwise': lambda on: F.conv2d(on(IMAGE), on(FILTERS)[:4, :1], groups=4),
    'unfold': lambda on: F.unfold(on(IMAGE), 3),
    'max_pool2d': lambda on: F.max_pool2d(on(IMAGE), 3, 2, 1),
    'avg_pool2d': lambda on: F.avg_pool2d(on(IMAGE), 2),
    'adaptive_avg_pool2d': lambda on: F.adaptive_avg_pool2d(on(IMAGE), 3),
    'bilinear': lambda on: F.interpolate(on(IMAGE), size=(13, 5), mode='bilinear'),
    'bicubic': lambda on: F.interpolate(on(IMAGE), scale_factor=2, mode='bicubic'),
    'nearest': lambda on: F.interpolate(on(IMAGE), scale_factor=2),
    'grid_sample': lambda on: F.grid_sample(on(IMAGE), on(GRID), align_corners=True),
    'pixel_shuffle': lambda on: F.pixel_shuffle(on(IMAGE), 2),
    'layer_norm': lambda on: F.layer_norm(on(IMAGE), (7,)),
    'group_norm': lambda on: F.group_norm(on(IMAGE), 2),
    'batch_norm': lambda on: F.batch_norm(on(IMAGE), None, None, training=True),
    'instance_norm': lambda on: F.instance_norm(on(IMAGE)),
    'cross_entropy': lambda on: F.cross_entropy(on(IMAGE), on(LABELS)),
    'cross_entropy of pixels': lambda on: F.cross_entropy(on(IMAGE), on(LABELS), reduction='none'),
    'binary_cross_entropy': lambda on: F.binary_cross_entropy_with_logits(
        on(IMAGE), on(IMAGE).sigmoid()
    ),
    'embedding': lambda on: F.embedding(on(INDICES), on(MATRIX)),
    'one_hot': lambda on: F.one_hot(on(INDICES), 6),
    # indices, shapes, new tensors
    'index': lambda on: on(MATRIX)[on(INDICES)],
    'index by a mask': lambda on: on(IMAGE)[on(IMAGE) > 0],
    'index from the host': lambda on: on(MATRIX)[INDICES],
    'index_put': lambda on: (
        on(MATRIX).clone().index_put_((on(INDICES),), on(MATRIX)[0], accumulate=True)
    ),
    'scatter_add': lambda on: on(torch.zeros(6)).scatter_add_(0, on(INDICES), on(MATRIX)[0, :5]),
    'index_select': lambda on: on(MATRIX).index_select(1, on(INDICES)),
    'gather': lambda on: on(MATRIX).gather(1, on(INDICES)[None].expand(6, 5)),
    'nonzero': lambda on: on(IMAGE).gt(1).nonzero(),
    'cat': lambda on: torch.cat([on(IMAGE), on(IMAGE)], 1),
    'stack': lambda on: torch.stack([on(MATRIX), on(MATRIX)]),
    'roll': lambda on: on(IMAGE).roll(2, 3),
    'flip': lambda on: on(IMAGE).flip(2),
    'triu': lambda on: on(MATRIX).triu(),
    'pad': lambda on: F.pad(on(IMAGE), (1, 2, 1, 0), mode='reflect'),
    'contiguous': lambda on: on(IMAGE).permute(0, 2, 3, 1).contiguous(),
    'channels_last': lambda on: on(IMAGE).to(memory_format=torch.channels_last) + 1,
    'resize': lambda on: on(IMAGE).clone().resize_(3, 4) * 2,
    'arange': lambda on: torch.arange(9, device=on(IMAGE).device),
    'linspace': lambda on: torch.linspace(0, 1, 7, device=on(IMAGE).device),
}
WITH_GRADIENT = (
    'mul',
    'gelu',
    'softmax',
    'cumsum',
    'matmul',
    'conv2d',
    'conv_transpose2d',
    'depthwise',
    'max_pool2d',
    'adaptive_avg_pool2d',
    'bilinear',
    'nearest',
    'grid_sample',
    'unfold',
    'layer_norm',
    'group_norm',
    'batch_norm',
    'cross_entropy',
    'binary_cross_entropy',
    'index',
    'pad',
    'channels_last',
)


def tensors_in(value: Any) -> List[Tensor]:
    """Return the tensors of nested tuples and lists."""
    return (
        [value]
        if isinstance(value, Tensor)
        else list(itertools.chain.from_iterable(map(tensors_in, value)))
    )


@pytest.mark.parametrize('name', CASES)
def test_an_operator_equals_the_cpus(name: str) -> None:
    results = tensors_in(CASES[name](lambda tensor: tensor.to(CUDA)))
    expected = tensors_in(CASES[name](lambda tensor: tensor))
    for result, answer in zip(results, expected):
        assert result.device == CUDA
        assert result.dtype == answer.dtype and result.stride() == answer.stride()
        assert torch.equal(result.cpu(), answer)


@pytest.mark.parametrize('name', WITH_GRADIENT)
def test_a_gradient_equals_the_cpus(name: str) -> None:
    gradients = []
    for device in (CUDA, CPU):
        leaves = {
            id(tensor): tensor.to(device).detach().requires_grad_()
            for tensor in (IMAGE, MATRIX, FILTERS)
        }
        output = CASES[name](
            lambda tensor, leaves=leaves, device=device: leaves.get(id(tensor), tensor.to(device))
        )
        output.pow(2).sum().backward()
        gradients.append([leaf.grad for leaf in leaves.values() if leaf.grad is not None])
    assert gradients[0] and all(gradient.device == CUDA for gradient in gradients[0])
    assert all(torch.equal(a.cpu(), b) for a, b in zip(*gradients))


@pytest.mark.parametrize('masked', [False, True])
@pytest.mark.parametrize(
    'dtype, kernel',
    [
        (torch.float32, 'ScaledDotProductEfficientAttentionBackward'),
        (torch.bfloat16, 'ScaledDotProductCudnnAttentionBackward'),
    ],
)
def test_pytorch_chooses_a_gpus_attention_and_it_equals_the_cpus(
    dtype: torch.dtype, kernel: str, masked: bool
) -> None:
    results = []
    for device in (CUDA, CPU):
        query, key, value = (
            torch.randn(2, 3, 16, 32, generator=torch.Generator().manual_seed(seed))
            .to(device, dtype)
            .requires_grad_()
            for seed in range(3)
        )
        mask: Optional[Tensor] = None
        if masked:
            mask = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(4)) > 0.3
            mask = mask.to(device)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        if device == CUDA:
            assert output.grad_fn.name().startswith(kernel)
        output.float().pow(2).sum().backward()
        results.append([output.detach(), query.grad, key.grad, value.grad])
    assert all(torch.equal(a.cpu(), b) for a, b in zip(*results))


def draw() -> List[Tensor]:
    return [
        torch.rand(4, device=CUDA),
        F.dropout(torch.ones(8, device=CUDA)),
        torch.randperm(9, device=CUDA),
    ]


def test_a_seed_repeats_the_numbers_of_its_device() -> None:
    torch.cuda.manual_seed_all(3)
    first = draw()
    elsewhere = torch.rand(4, device='cuda:0')
    torch.cuda.manual_seed_all(3)
    assert all(torch.equal(a, b) for a, b in zip(first, draw()))
    assert torch.equal(elsewhere, torch.rand(4, device='cuda:0'))
    assert not torch.equal(first[0], torch.rand(4, device=CUDA))


def test_a_saved_state_repeats_the_numbers() -> None:
    state = torch.cuda.get_rng_state(CUDA)
    first = draw()
    assert not torch.equal(first[0], draw()[0])
    torch.cuda.set_rng_state(state, CUDA)
    assert all(torch.equal(a, b) for a, b in zip(first, draw()))
    generator = torch.Generator(device=CUDA).manual_seed(9)
    numbers = torch.rand(3, device=CUDA, generator=generator)
    again = torch.rand(3, device=CUDA, generator=generator.manual_seed(9))
    assert torch.equal(numbers, again)


def test_random_numbers_of_a_device_leave_the_cpus_alone() -> None:
    state = torch.get_rng_state()
    draw()
    assert torch.equal(state, torch.get_rng_state())


def test_tensors_of_two_devices_are_not_added() -> None:
    for other in ('cuda:0', 'cpu'):
        with pytest.raises(RuntimeError, match='Expected all tensors to be on the same device'):
            torch.ones(3, device=CUDA) + torch.ones(3, device=other)
    # a single number of the host may be
    assert (torch.ones(3, device=CUDA) + torch.tensor(1.0)).tolist() == [2, 2, 2]


def test_the_current_device_is_the_one_that_is_chosen() -> None:
    with torch.cuda.device(1):
        assert torch.ones(2, device='cuda').device == CUDA
    assert torch.ones(2, device='cuda').device == torch.device('cuda', 0)


def test_an_operator_without_a_cpu_kernel_fails_by_name() -> None:
    with pytest.raises(RuntimeError, match='the CUDA double has no aten::_cudnn_init_dropout'):
        torch._cudnn_init_dropout_state(0.5, True, 1, dtype=torch.uint8, device=CUDA)


def test_a_kernel_that_no_operator_launches_fails_by_name(
    capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('CUDA_DOUBLE_BACKTRACE', '1')
    with pytest.raises(RuntimeError, match='operation not supported'):
        torch.cuda._sleep(10)
    message = 'cannot launch at::cuda::(anonymous namespace)::spin_kernel(long)'
    output = capfd.readouterr().err
    assert message in output
    assert 'libtorch_cuda.so' in output  # a frame of the caller
