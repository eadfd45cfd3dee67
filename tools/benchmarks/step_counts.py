"""What a training step asks of a card: operators, casts, layout copies, bytes, operations.

    python tools/benchmarks/step_counts.py [--arch large] [--side 512] [--batch 2]
        [--bytes-per-second 4.8e12] [--operations-per-second 989e12] [--rows TEXT]

Runs without a card and without computing anything: the tensors have shapes and strides alone
(FakeTensorMode), and a training step in bfloat16 autocast is counted. Bytes are those of operands
and results, each once: what a card without fusion moves. Views and metadata are not counted. The
last columns are predictions from the two rates of a card, by default those of NVIDIA's data sheet
of the H200 (memory; dense bfloat16); a measurement may contradict them. DINOv3 + UPerNet, frozen,
is ours and transformers' backbone under the same head. The stock models are MMSegmentation's,
without their auxiliary heads.
"""

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, Iterable, List, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import mmseg  # noqa: E402
import torch  # noqa: E402
from _common import describe_machine  # noqa: E402
from dinov3_training import CLASSES, Reference, Segmentor  # noqa: E402
from mmengine.config import Config  # noqa: E402
from mmengine.registry import MODELS, DefaultScope  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import (  # noqa: E402
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from mapsage.distributed.wrappers.memory_layout import put_channels_last  # noqa: E402
from mapsage.models import DINOv3ViT  # noqa: E402
from mapsage.models.backbones import dinov3_blocks, rope  # noqa: E402
from mapsage.models.backbones.dinov3_weights import ARCHS  # noqa: E402

# Beginnings of the names of operators that move no data.
VIEWS = tuple(
    'view reshape transpose t. permute expand slice select unsqueeze squeeze split detach alias '
    'as_strided unbind chunk unsafe_view _unsafe_view lift empty new_empty is_ device '
    'promote_types'.split()
)
COPIES = ('clone', 'contiguous', 'copy_')


class StepCount(TorchDispatchMode):
    """Counts what is dispatched.

    Args:
        frozen: Weights that no gradient reaches.

    Attributes:
        calls: Number of calls of each operator.
        bytes: Bytes of operands and results of each operator.
        frozen_casts: Number of casts of frozen weights.
        copies: Number of copies that keep the dtype: of layouts, since a step has no others.
        operations: Multiplications and additions in matrix products and convolutions.
    """

    def __init__(self, frozen: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._frozen = {weight.untyped_storage()._cdata for weight in frozen}
        self.calls: Counter = Counter()
        self.bytes: Counter = Counter()
        self.frozen_casts = self.copies = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__
        if name.startswith(VIEWS):
            return result
        out = (kwargs or {}).get('out')
        leaves = tree_leaves((args, kwargs, None if result is out else result))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.calls[name] += 1
        self.bytes[name] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if name.startswith(COPIES):
            self.copies += 1
        elif name.startswith('_to_copy') and tensors:
            self.frozen_casts += tensors[0].untyped_storage()._cdata in self._frozen
        self.operations += _operations(name, args, result)
        return result


def _operations(name: str, args: Any, result: Any) -> int:
    if name.startswith(('addmm', 'mm', 'bmm', 'baddbmm')):
        first = args[1] if name.startswith(('addmm', 'baddbmm')) else args[0]
        return 2 * result.numel() * first.shape[-1]
    if name.startswith('convolution.'):
        image, weight, transposed = args[0], args[1], args[6]
        return 2 * (image if transposed else result).numel() * weight[0].numel()
    if name.startswith('convolution_backward'):
        grad, image, weight, transposed, mask = (args[index] for index in (0, 1, 2, 7, 10))
        return 2 * (image if transposed else grad).numel() * weight[0].numel() * sum(mask[:2])
    if name.startswith('_scaled_dot_product'):
        query, key = args[-2 if 'backward' in name else 0], args[1]
        return 4 * query.numel() * key.shape[-2]
    return 0


def _dinov3(arch: str, ours: bool) -> Tuple[nn.Module, nn.Module]:
    backbone = DINOv3ViT(arch, normalization=None, frozen=True)
    if not ours:
        backbone = Reference(ARCHS[arch], list(backbone.out_indices), True)
    return Segmentor(backbone, ARCHS[arch].embed_dims), backbone


class Stock(nn.Module):
    """A model of MMSegmentation's configs, with the loss of :class:`Segmentor`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = _stock(name)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.model(x, mode='tensor').float()
        scores = nn.functional.interpolate(scores, labels.shape[1:], mode='bilinear')
        return nn.functional.cross_entropy(scores, labels)


def _stock(name: str) -> nn.Module:
    folder = Path(mmseg.__file__).parent / '.mim' / 'configs' / '_base_' / 'models'
    base = 'upernet_r50.py' if name == 'ResNet-50 + UPerNet' else 'segformer_mit-b0.py'
    model = Config.fromfile(str(folder / base)).model
    if base.startswith('segformer'):
        model.backbone.update(embed_dims=64, num_layers=[3, 4, 6, 3])
        model.decode_head.in_channels = [64, 128, 320, 512]
    model.pop('pretrained', None)
    model.backbone.pop('pretrained', None)
    text = model.to_dict()
    _replace_norm(text)
    text.pop('auxiliary_head', None)
    text['decode_head']['num_classes'] = CLASSES
    with unset_fake_temporarily():
        built = MODELS.build(text)
    # The backbone reads numbers while it is built, so its weights become fake afterwards.
    for module in built.modules():
        for key, value in module._parameters.items():
            if value is not None:
                module._parameters[key] = nn.Parameter(torch.empty(value.shape))
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return built


def _replace_norm(config: Any) -> None:
    """SyncBN needs several processes; one process computes BN."""
    for value in config.values() if isinstance(config, dict) else config:
        if isinstance(value, dict) and value.get('type') == 'SyncBN':
            value['type'] = 'BN'
        elif isinstance(value, (dict, list)):
            _replace_norm(value)


def count_step(
    model: nn.Module, frozen: Iterable[torch.Tensor], x: torch.Tensor, labels: torch.Tensor
) -> StepCount:
    """Return the counts of the second step; the first one makes what later steps reuse."""
    for _ in range(2):
        count = StepCount(frozen)
        with count:
            with torch.autocast('cpu', torch.bfloat16):
                loss = model(x, labels)
            loss.backward()
        model.zero_grad()
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--arch', default='large', choices=list(ARCHS))
    parser.add_argument('--side', type=int, default=512)
    parser.add_argument('--batch', type=int, default=2)
    parser.add_argument('--bytes-per-second', type=float, default=4.8e12)
    parser.add_argument('--operations-per-second', type=float, default=989e12)
    parser.add_argument('--rows', default='', metavar='TEXT', help='only rows that hold this text')
    args = parser.parse_args()
    warnings.simplefilter('ignore')
    # Shapes need no random numbers, and a truncated normal distribution reads them.
    nn.init.trunc_normal_ = lambda tensor, *_, **__: tensor
    # A fake tensor has no address.
    torch.Tensor.data_ptr = lambda tensor: tensor.untyped_storage()._cdata  # type: ignore[assignment]
    on_cpu = rope.joins_kernels

    def on_card(x: torch.Tensor) -> bool:
        return not torch.is_grad_enabled()

    print(
        f'{describe_machine()}; {args.side} pixels, batch {args.batch}, bfloat16 autocast\n\n'
        '| model | form | operators | of them `_to_copy` | casts of frozen weights '
        '| layout copies | GB | TFLOP | ms memory | ms matrices | ms together |\n'
        '|---|---|---|---|---|---|---|---|---|---|---|'
    )
    rows: List[Tuple[str, str]] = [
        (f'DINOv3 {args.arch} + UPerNet', 'transformers'),
        (f'DINOv3 {args.arch} + UPerNet', 'ours, as on a CPU'),
        (f'DINOv3 {args.arch} + UPerNet', 'ours, fast on a card'),
        *(
            (name, form)
            for name in ('ResNet-50 + UPerNet', 'SegFormer-B2')
            for form in ('stock', 'channels last')
        ),
    ]
    for name, form in rows:
        if args.rows not in f'{name}, {form}':
            continue
        with FakeTensorMode(), DefaultScope.overwrite_default_scope('mmseg'):
            x = torch.randn(args.batch, 3, args.side, args.side)
            labels = torch.randint(0, CLASSES, (args.batch, args.side, args.side))
            frozen: List[nn.Parameter] = []
            if name.startswith('DINOv3'):
                model, backbone = _dinov3(args.arch, form != 'transformers')
                frozen = list(backbone.parameters())
            else:
                model = Stock(name)
            fast = form in ('ours, fast on a card', 'channels last')
            if fast:
                put_channels_last(model)
            rope.joins_kernels = dinov3_blocks.joins_kernels = on_card if fast else on_cpu
            count = count_step(model.train(), frozen, x, labels)
        moved = sum(count.bytes.values())
        memory = 1e3 * moved / args.bytes_per_second
        matrices = 1e3 * count.operations / args.operations_per_second
        print(
            f'| {name} | {form} | {sum(count.calls.values())} '
            f'| {count.calls["_to_copy.default"]} | {count.frozen_casts} | {count.copies} '
            f'| {moved / 1e9:.1f} | {count.operations / 1e12:.2f} | {memory:.1f} '
            f'| {matrices:.1f} | {memory + matrices:.1f} |',
            flush=True,
        )


if __name__ == '__main__':
    main()
