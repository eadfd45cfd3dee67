"""Training steps of segmentors: stock, ours, with each fast option, and compiled.

    python tools/benchmarks/segmentors_gpu.py [--arch large] [--side 512] [--batch 8] [--steps 20]
    python tools/benchmarks/segmentors_gpu.py --arch tiny --side 64 --batch 2 --steps 3   # any CPU

Random weights and images in memory, bfloat16, AdamW. Frozen PMT and UPerNet, EoMT, UPerNet trained
as a whole, ResNet-50 + UPerNet, SegFormer-B2, EfficientNet-Lite0 + FPN. `stock` is MMEngine's own
AmpOptimWrapper on the same model, and the last column compares with its time; `stock float32` is
its OptimWrapper, and `fast` is channels last and fused. Each row runs in a process of its own. MFU
is the share of the device's matmul rate, measured here (bfloat16, square), that the products of
forward and backward pass reach.
"""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import mmseg  # noqa: E402
import torch  # noqa: E402
from _common import describe_machine  # noqa: E402
from _segmentors import model_of  # noqa: E402
from dinov3_training import matmul_rate  # noqa: E402
from mmengine.config import Config, ConfigDict  # noqa: E402
from mmengine.model import revert_sync_batchnorm  # noqa: E402
from mmengine.optim import AmpOptimWrapper as StockAmp  # noqa: E402
from mmengine.optim import OptimWrapper  # noqa: E402
from mmengine.registry import MODELS, DefaultScope  # noqa: E402
from mmengine.structures import PixelData  # noqa: E402
from mmseg.structures import SegDataSample  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import mapsage  # noqa: E402, F401
from mapsage.accelerator import Accelerator, resolve_accelerator  # noqa: E402
from mapsage.distributed.wrappers import place_module  # noqa: E402
from mapsage.distributed.wrappers.memory_layout import put_channels_last  # noqa: E402
from mapsage.distributed.wrappers.optim_wrapper import AmpOptimWrapper  # noqa: E402
from mapsage.engine.compiled_parts import compile_parts  # noqa: E402
from mapsage.models.backbones.dinov3_weights import ARCHS  # noqa: E402

CLASSES = 7
TINY = dict(embed_dims=32, num_layers=4, num_heads=2, feedforward_channels=64)
LOOPS = ('stock float32', 'stock', 'ours', 'channels last', 'fused', 'fast', 'compiled')
MODEL_KINDS = (
    'frozen UPerNet',
    'UPerNet',
    'EoMT',
    'ResNet-50 UPerNet',
    'SegFormer-B2',
    'EfficientNet-Lite0 FPN',
    'frozen PMT',
)
# Models of MMSegmentation's configs.
_STOCK = {'ResNet-50 UPerNet': 'upernet_r50.py', 'SegFormer-B2': 'segformer_mit-b0.py'}


def _stock_config(kind: str, side: int) -> Dict[str, Any]:
    """Return the config of a model that MMSegmentation ships."""
    folder = Path(mmseg.__file__).parent / '.mim' / 'configs' / '_base_' / 'models'
    model = Config.fromfile(str(folder / _STOCK[kind])).model.to_dict()
    if kind == 'SegFormer-B2':
        model['backbone'].update(embed_dims=64, num_layers=[3, 4, 6, 3])
        model['decode_head']['in_channels'] = [64, 128, 320, 512]
    model['backbone'].pop('pretrained', None)
    for name in ('decode_head', 'auxiliary_head'):
        if name in model:
            model[name]['num_classes'] = CLASSES
    return dict(model, pretrained=None)


def config_of(kind: str, name: str, side: int) -> Dict[str, Any]:
    """Return the config of a segmentor."""
    size = dict(size=(side, side), bgr_to_rgb=True, pad_val=0, seg_pad_val=255)
    if kind in _STOCK or kind.startswith('EfficientNet'):
        if kind in _STOCK:
            model = _stock_config(kind, side)
        else:
            model = model_of('lite0 fpn', CLASSES, side)
            del model['backbone']['init_cfg']
        return dict(model, data_preprocessor=dict(type='SegDataPreProcessor', **size))
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
        data_preprocessor=dict(type='SegDataPreProcessor', **size),
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
    fused = dict(fused=True) if loop in ('fused', 'fast', 'compiled') else {}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, **fused)
    if loop == 'stock float32':
        return OptimWrapper(optimizer=optimizer)
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
    if loop in ('channels last', 'fast', 'compiled'):
        put_channels_last(model)
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
        '| model | loop | step | MiB at most | MFU | compiled | stock / this |\n'
        '|---|---|---|---|---|---|---|',
        flush=True,
    )
    failed = 0
    for kind in args.models:
        stock = 0.0
        # The memory of one must not count for the next; MMEngine's AMP is for cards alone.
        for loop in args.loops:
            if loop == 'stock' and accelerator.device_type == 'cpu':
                continue
            finished = subprocess.run(
                [sys.executable, *sys.argv, '--one', f'{kind},{loop}'],
                check=False,
                stdout=subprocess.PIPE,
                text=True,
            )
            failed += finished.returncode != 0
            found = re.search(r'\| ([0-9.]+) ms \|', finished.stdout)
            if found is None:
                print(finished.stdout, end='', flush=True)
                continue
            stock = float(found[1]) if loop == 'stock' else stock
            ratio = f'{stock / float(found[1]):.2f}' if stock and loop in LOOPS[1:] else ''
            print(finished.stdout.rstrip() + f' {ratio} |', flush=True)
    sys.exit(failed and f'{failed} row(s) failed')


if __name__ == '__main__':
    main()
