"""Windows a second of maps on a card, as a share of the bare model's.

    python tools/benchmarks/card_maps.py [--arch large] [--side 512] [--batch 16] [--batches 12]
    python tools/benchmarks/card_maps.py --count

For each model and dtype: the bare model on images that lie on the device, the same with channels
last, and what a map computes of windows in host memory: copy, normalization, model, weights,
blending on the device, and one byte a pixel back. Same batch and dtype; random weights.

--count needs no card: what a map adds to its model, for windows of seven classes on tensors without
numbers (device meta) and a model that does nothing. An operator is a view or a kernel.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _common import describe_machine  # noqa: E402
from mmengine.config import ConfigDict  # noqa: E402
from mmengine.model import revert_sync_batchnorm  # noqa: E402
from mmengine.registry import MODELS, DefaultScope  # noqa: E402
from segmentors_gpu import config_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from mapsage.accelerator import resolve_accelerator, set_current_accelerator  # noqa: E402
from mapsage.distributed.wrappers import place_module  # noqa: E402
from mapsage.distributed.wrappers.memory_layout import put_channels_last  # noqa: E402
from mapsage.maps.predictor import WindowPredictor  # noqa: E402

MODEL_KINDS = ('EfficientNet-Lite0 FPN', 'ResNet-50 UPerNet', 'frozen UPerNet')


def map_row(predictor: Any, blender: Any, windows: Any, step: int) -> None:
    """Compute a row of windows and blend it, each window ``step`` columns right of the one before."""
    valid = np.ones(windows[0].shape[1:], bool)
    scores = predictor(predictor.stack(windows))
    blender.begin(step)
    for index in range(len(windows)):
        blender.add(index * step, scores[index], predictor.weights, valid)
    blender.take()


class Nothing(nn.Module):
    """A model whose scores are there already."""

    num_classes = out_channels = 7

    def __init__(self, side: int, batch: int) -> None:
        super().__init__()
        self.data_preprocessor = MODELS.build(
            dict(type='mmseg.SegDataPreProcessor', mean=[1.0] * 3, std=[1.0] * 3, bgr_to_rgb=True)
        ).to(torch.device('meta'))
        self.scores = torch.empty(batch, 7, side, side, device='meta')

    def encode_decode(self, inputs: torch.Tensor, metas: Any) -> torch.Tensor:
        return self.scores


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def count_operators(side: int, batch: int, rounds: int) -> str:
    """Return operators, operators that compute or copy, and processor time, a window each."""
    step = side - side // 4
    predictor = WindowPredictor(
        Nothing(side, batch), torch.device('meta'), (side, side), side // 4, batch
    )
    width = step * (batch - 1) + side
    blender: Any = predictor.blender(
        (side, side), width, side // 4, confidence=False, probabilities=False
    )
    # Tensors without numbers arrive on the host as zeros.
    blender._copy_to_host = lambda tensor: lambda: torch.zeros(tensor.shape, dtype=tensor.dtype)
    windows = [np.zeros((3, side, side), np.uint8)] * batch
    map_row(predictor, blender, windows, step)
    operators = _Operators()
    with operators:
        map_row(predictor, blender, windows, step)
    views = 'slice. select. alias. view. detach. unbind. expand. is_pinned. promote_types.'.split()
    kernels = {
        name: calls for name, calls in operators.calls.items() if not name.startswith(tuple(views))
    }
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        map_row(predictor, blender, windows, step)
        seconds.append(time.process_time() - start)
    return (
        f'{sum(operators.calls.values()) / batch:.1f} operators a window, '
        f'{sum(kernels.values()) / batch:.1f} of them no views; '
        f'{1e3 * statistics.median(seconds) / batch:.2f} ms of processor time'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--arch', default='large', help='DINOv3 of the frozen UPerNet')
    parser.add_argument('--side', type=int, default=512)
    parser.add_argument('--batch', type=int, default=16)
    parser.add_argument('--batches', type=int, default=12)
    parser.add_argument('--models', nargs='+', default=list(MODEL_KINDS), choices=MODEL_KINDS)
    parser.add_argument('--count', action='store_true', help='count operators, without a card')
    args = parser.parse_args()
    if args.count:
        set_current_accelerator(resolve_accelerator('cpu'))
        torch.set_num_threads(1)
        print(f'{describe_machine()}; {args.side}x{args.side}, batch {args.batch}')
        print(count_operators(args.side, args.batch, args.batches))
        return
    accelerator = set_current_accelerator(resolve_accelerator('auto'))
    device, side, batch = accelerator.device(0), args.side, args.batch
    print(
        f'{describe_machine()}, {accelerator.name}; {side}x{side}, batch {batch}\n\n'
        '| model | dtype | bare, windows/s | channels last | a map | a map / bare |\n'
        '|---|---|---|---|---|---|',
        flush=True,
    )

    def rate(run: Callable[[], Any]) -> float:
        run()
        accelerator.synchronize()
        start = time.perf_counter()
        for _ in range(args.batches):
            run()
        accelerator.synchronize()
        return batch * args.batches / (time.perf_counter() - start)

    half = torch.bfloat16 if accelerator.native_bfloat16() in (True, None) else torch.float16
    metas = [dict(ori_shape=(side,) * 2, img_shape=(side,) * 2, padding_size=[0] * 4)] * batch
    images = torch.rand(batch, 3, side, side, device=device) * 255
    windows = [np.random.randint(0, 255, (3, side, side), np.uint8) for _ in range(batch)]
    for kind in args.models:
        with DefaultScope.overwrite_default_scope('mmseg'):
            config = ConfigDict(config_of(kind, args.arch, side))
            model: Any = revert_sync_batchnorm(MODELS.build(config))
        model = place_module(model, accelerator, 0).eval()
        for dtype in (None, half):
            predictor = WindowPredictor(model, device, (side, side), side // 4, batch, amp=dtype)
            blender = predictor.blender(
                (side, side), side * batch, 0, confidence=False, probabilities=False
            )

            def bare(model: Any = model, x: torch.Tensor = images, dtype: Any = dtype) -> None:
                with torch.no_grad(), torch.autocast(
                    device.type, dtype=dtype or half, enabled=dtype is not None
                ):
                    model.encode_decode(x, metas)

            def row(predictor: Any = predictor, blender: Any = blender) -> None:
                map_row(predictor, blender, windows, side)

            plain, whole = rate(bare), rate(row)
            put_channels_last(model)
            last = rate(bare)
            for parameter in model.parameters():
                parameter.data = parameter.data.contiguous()
            name = 'float32' if dtype is None else str(dtype).split('.')[1]
            print(
                f'| {kind} | {name} | {plain:.0f} | {last:.0f} | {whole:.0f} | {whole / plain:.2f} |',
                flush=True,
            )


if __name__ == '__main__':
    main()
