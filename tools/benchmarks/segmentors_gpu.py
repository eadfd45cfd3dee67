"""Training steps of PMT, EoMT and UPerNet on DINOv3, compiled and not, against the stock loop.

    python tools/benchmarks/segmentors_gpu.py [--arch large] [--side 512] [--batch 8] [--steps 20]
    python tools/benchmarks/segmentors_gpu.py --arch tiny --side 64 --batch 2 --steps 3   # any CPU

Random weights and images in memory, bfloat16, AdamW. Frozen PMT and UPerNet, EoMT, and UPerNet
trained as a whole; `stock` is MMEngine's own AmpOptimWrapper on the same model. Each row runs in a
process of its own. MFU is the share of the device's matmul rate, measured here (bfloat16, square),
that the products of forward and backward pass reach.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import torch  # noqa: E402
from _common import describe_machine  # noqa: E402
from dinov3_training import matmul_rate  # noqa: E402
from mmengine.config import ConfigDict  # noqa: E402
from mmengine.model import revert_sync_batchnorm  # noqa: E402
from mmengine.optim import AmpOptimWrapper as StockAmp  # noqa: E402
from mmengine.registry import MODELS, DefaultScope  # noqa: E402
from mmengine.structures import PixelData  # noqa: E402
from mmseg.structures import SegDataSample  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import mapsage  # noqa: E402, F401
from mapsage.accelerator import Accelerator, resolve_accelerator  # noqa: E402
from mapsage.distributed.wrappers import place_module  # noqa: E402
from mapsage.distributed.wrappers.optim_wrapper import AmpOptimWrapper  # noqa: E402
from mapsage.engine.compiled_parts import compile_parts  # noqa: E402
from mapsage.models.backbones.dinov3_weights import ARCHS  # noqa: E402

CLASSES = 7
TINY = dict(embed_dims=32, num_layers=4, num_heads=2, feedforward_channels=64)
LOOPS = ('stock', 'ours', 'compiled')
MODEL_KINDS = ('frozen PMT', 'frozen UPerNet', 'UPerNet', 'EoMT')


def config_of(kind: str, name: str, side: int) -> Dict[str, Any]:
    """Return the config of a segmentor."""
    arch: Any = TINY if name == 'tiny' else ARCHS[name]._asdict()
    dims, layers, heads = (arch[key] for key in ('embed_dims', 'num_layers', 'num_heads'))
    joint = 2 if name == 'tiny' else 3 if name in ('small', 'base') else 4
    backbone = dict(type='DINOv3ViT', arch=arch, frozen=kind.startswith('frozen'))
    common = dict(num_classes=CLASSES, align_corners=False)
    model = dict(
        type='EncoderDecoder',
        backbone=backbone,
        train_cfg=dict(),
        test_cfg=dict(mode='whole'),
        data_preprocessor=dict(
            type='SegDataPreProcessor',
            size=(side, side),
            bgr_to_rgb=True,
            pad_val=0,
            seg_pad_val=255,
        ),
    )
    if kind == 'EoMT':
        model['type'] = 'EoMT'
        backbone['out_indices'] = (layers - 1,)
        model['decode_head'] = dict(common, type='EoMTHead', in_channels=dims, num_blocks=joint)
    elif kind == 'frozen PMT':
        backbone['prefix_tokens'] = True
        model['decode_head'] = dict(
            common,
            type='PMTHead',
            in_channels=[dims] * 4,
            num_heads=heads,
            num_blocks=2 if name == 'tiny' else 6,
            norm_cfg=dict(type='BN1d'),
        )
    else:
        norm, width = dict(type='BN'), 16 if name == 'tiny' else 512
        model['neck'] = dict(type='Feature2Pyramid', embed_dim=dims, norm_cfg=norm)
        model['decode_head'] = dict(
            common,
            type='UPerHead',
            in_channels=[dims] * 4,
            in_index=[0, 1, 2, 3],
            channels=width,
            norm_cfg=norm,
        )
    return model


def batch_of(count: int, side: int) -> Dict[str, Any]:
    """Return a batch as a loader gives it."""
    meta = dict(
        img_path='',
        img_shape=(side, side),
        ori_shape=(side, side),
        pad_shape=(side, side),
        padding_size=[0] * 4,
    )
    images = [torch.randint(0, 256, (3, side, side), dtype=torch.uint8) for _ in range(count)]
    coarse = [torch.randint(0, CLASSES, (1, side // 16, side // 16)) for _ in range(count)]
    samples = [
        SegDataSample(
            metainfo=meta,
            gt_sem_seg=PixelData(data=each.repeat_interleave(16, 1).repeat_interleave(16, 2)),
        )
        for each in coarse
    ]
    return dict(inputs=images, data_samples=samples)


def wrapper_of(loop: str, model: Any) -> Any:
    """Return the optimizer wrapper of MMEngine or ours."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    if loop == 'stock':
        return StockAmp(dtype='bfloat16', optimizer=optimizer)
    return AmpOptimWrapper(dtype='bfloat16', optimizer=optimizer)


def measure(accelerator: Accelerator, kind: str, loop: str, args: argparse.Namespace) -> str:
    """Return a row: step time, memory, MFU, and what was compiled."""
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmseg'):
        model: Any = revert_sync_batchnorm(
            MODELS.build(ConfigDict(config_of(kind, args.arch, args.side)))
        )
    model = place_module(model, accelerator, 0).train()
    optim_wrapper = wrapper_of(loop, model)
    batch = batch_of(args.batch, args.side)

    def step() -> None:
        model.train_step(dict(batch), optim_wrapper)

    with FlopCounterMode(display=False) as counted:
        step()
    counters.clear()
    if loop == 'compiled':
        compile_parts(model, dict(backbone=True, decode_head=True))
    start = time.perf_counter()
    for _ in range(3):
        step()
    accelerator.synchronize()
    first = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(args.steps):
        step()
    accelerator.synchronize()
    each = (time.perf_counter() - start) / args.steps
    most = accelerator.max_memory_allocated()
    rate = matmul_rate(accelerator, args.matrix)
    graphs, breaks = counters['stats']['unique_graphs'], sum(counters['graph_break'].values())
    said = f'{graphs} graphs, {breaks} breaks, first 3 steps {first:.0f} s'
    return (
        f'| {kind} | {loop} | {1000 * each:.1f} ms | '
        + ('unknown' if most is None else f'{most / 2**20:.0f}')
        + f' | {counted.get_total_flops() / each / rate:.0%} of {rate / 1e12:.2f} T/s '
        + f'| {said if loop == "compiled" else ""} |'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--arch', default='large', choices=['tiny', *ARCHS])
    parser.add_argument('--side', type=int, default=512)
    parser.add_argument('--batch', type=int, default=8)
    parser.add_argument('--steps', type=int, default=20)
    parser.add_argument('--matrix', type=int, default=8192)
    parser.add_argument('--models', nargs='+', default=list(MODEL_KINDS), choices=MODEL_KINDS)
    parser.add_argument('--loops', nargs='+', default=list(LOOPS), choices=LOOPS)
    parser.add_argument('--accelerator', default='auto')
    parser.add_argument('--one', help='one row alone, in a process of its own: EoMT,compiled')
    args = parser.parse_args()
    accelerator = resolve_accelerator(args.accelerator)
    if args.one:
        print(measure(accelerator, *args.one.split(','), args), flush=True)
        return
    print(
        f'{describe_machine()}, {accelerator.name}; {args.arch}, {args.side}x{args.side}, '
        f'batch {args.batch}, bfloat16, {args.steps} steps\n\n'
        '| model | loop | step | MiB at most | MFU | compiled |\n|---|---|---|---|---|---|',
        flush=True,
    )
    failed = 0
    for kind in args.models:
        # The memory of one must not count for the next; MMEngine's AMP is for cards alone.
        for loop in args.loops:
            if loop == 'stock' and accelerator.device_type == 'cpu':
                continue
            failed += (
                subprocess.run(
                    [sys.executable, *sys.argv, '--one', f'{kind},{loop}'], check=False
                ).returncode
                != 0
            )
    sys.exit(failed and f'{failed} row(s) failed')


if __name__ == '__main__':
    main()
