"""Fifty wrong kernels on simulated cards: are they named, and is a right one ever accused?

    OMP_NUM_THREADS=1 python tools/benchmarks/wrong_kernels.py [--configs-only | --kernels-only]

Plants one wrong kernel at a time and runs what `mapsage operators CONFIG --compare` runs. Then all
shipped configs run with right kernels, and three of them with kernels that round otherwise. The
result is in docs/how-to/gcu.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ContextManager, Dict, List, Sequence, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from _planted_kernels import (
    KINDS,
    late_result,
    other_rounding,
    planted,
    stray_write,
    wrong_after,
)
from mmengine.config import Config

from mapsage.accelerator import Accelerator, resolve_accelerator
from mapsage.commands import cli
from mapsage.commands.cli import read_config
from mapsage.extras.forensics.kernels import bisect_step, card_step, compare_step
from mapsage.extras.forensics.synthetic_step import SyntheticStep

DEMO, VIT, EOMT = (
    f'configs/demo/{name}_demo.py'
    for name in ('efficientnet_lite0_fpn', 'vit_tiny_lora', 'eomt_tiny')
)
# Kind of mistake -> operators with it, by config: 44, found operator by operator.
PLANTED: Dict[str, Dict[str, Sequence[str]]] = {
    'off by one': {
        DEMO: ('convolution', 'hardtanh_backward', 'upsample_bilinear2d', 'cat'),
        VIT: ('addmm', '_foreach_addcdiv_.ScalarList', 'native_layer_norm'),
        EOMT: ('bmm',),
    },
    'wrong stride': {
        DEMO: ('convolution_backward', 'upsample_bilinear2d_backward', '_log_softmax'),
        VIT: ('mm', 'gelu_backward', 'native_layer_norm_backward'),
        EOMT: ('bmm', 'sigmoid'),
    },
    'NaN': {
        DEMO: ('hardtanh', 'native_batch_norm', 'upsample_nearest2d_backward'),
        VIT: ('gelu', '_foreach_sqrt', 'native_group_norm', 'add.Tensor'),
        EOMT: ('div.Tensor',),
    },
    'stale buffer': {
        DEMO: ('add.Tensor', 'native_batch_norm_backward', 'convolution'),
        VIT: ('addmm', 'native_layer_norm', 'gelu_backward'),
        EOMT: ('mul.Tensor',),
    },
    'wrong dtype': {
        DEMO: ('convolution', 'upsample_bilinear2d', '_log_softmax_backward_data'),
        VIT: ('mm', 'native_layer_norm', '_foreach_lerp_.Scalar'),
        EOMT: ('bmm',),
    },
    'above a size': {
        DEMO: ('convolution', 'hardtanh', 'native_batch_norm_backward'),
        VIT: ('addmm', 'gelu', 'native_group_norm'),
    },
}
CROP = 64
_WIDTHS = ('in_channels', 'channels', 'embed_dim', 'num_heads')


Faults = List[Tuple[str, str, ContextManager[None]]]


def sequence_faults(config: str) -> Faults:
    """Return faults that only an undisturbed step has: kind, operator, the fault itself."""
    if config == DEMO:
        return [
            ('stray write', 'native_batch_norm', stray_write('native_batch_norm')),
            ('late result', 'hardtanh_backward', late_result('hardtanh_backward')),
            (
                'wrong after hardtanh_backward',
                'convolution_backward',
                wrong_after('convolution_backward', 'hardtanh_backward'),
            ),
        ]
    return [
        ('stray write', '_safe_softmax', stray_write('_safe_softmax')),
        ('late result', 'gelu', late_result('gelu')),
        ('wrong after gelu', 'addmm', wrong_after('addmm', 'gelu')),
    ]


def sample_step(config: str, accelerator: Accelerator, crop: int = CROP) -> SyntheticStep:
    args = cli.build_parser('', True).parse_args([str(ROOT / config), '--accelerator', 'sim'])
    return card_step(shrink(read_config(args)), accelerator, crop)


def shrink(cfg: Config) -> Config:
    """Return a config whose ViT-L has 4 layers and 64 channels, so that it fits a small machine."""
    backbone = cfg.model.get('backbone') or {}
    if backbone.get('arch') != 'large':
        return cfg
    narrow = {1024: 64, 512: 32, 16: 4}

    def narrowed(node: Any) -> Any:
        if isinstance(node, dict):
            # All other numbers, such as sizes of images, stay.
            return {
                key: narrow.get(value, value)
                if key in _WIDTHS and isinstance(value, int)
                else [narrow[width] for width in value]
                if key == 'in_channels' and isinstance(value, (list, tuple))
                else narrowed(value)
                for key, value in node.items()
            }
        return [narrowed(item) for item in node] if isinstance(node, (list, tuple)) else node

    model = narrowed(cfg.model.to_dict())
    model['backbone'].update(
        arch=dict(embed_dims=64, num_layers=4, num_heads=4, feedforward_channels=128),
        out_indices=tuple(range(4))[-len(backbone.get('out_indices') or (3,)) :],
    )
    cfg.model = model
    return cfg


def run_planted(accelerator: Accelerator) -> None:
    print('| operator | mistake | named | also accused | what the report says |')
    print('|---|---|---|---|---|')
    named = total = 0
    for config in (DEMO, VIT, EOMT):
        step = sample_step(config, accelerator)
        for kind, operators in (
            (kind, by_config.get(config, ())) for kind, by_config in PLANTED.items()
        ):
            for operator in operators:
                with planted(operator, KINDS[kind]()):
                    comparison = compare_step(step, accelerator)
                wrong = comparison.wrong
                total += 1
                named += operator in wrong
                text = wrong[operator].worst.text if operator in wrong else ''
                print(
                    f'| {operator} | {kind} | {"yes" if operator in wrong else "**no**"} | '
                    f'{", ".join(set(wrong) - {operator})} | {text} |',
                    flush=True,
                )
                step = sample_step(config, accelerator)
    for config in (DEMO, VIT):
        step = sample_step(config, accelerator)
        for kind, operator, fault in sequence_faults(config):
            with fault:
                alone = compare_step(step, accelerator).wrong
                step = sample_step(config, accelerator)
                bisection = bisect_step(step, accelerator)
                is_wrong = bisection.whole_step()
                culprit = bisection.find() if is_wrong else None
            total += 1
            is_named = (
                culprit is not None and operator in (culprit.name, *culprit.sources) and not alone
            )
            named += is_named
            text = (
                ''
                if culprit is None
                else (
                    f'operator {culprit.number} of {bisection.operators}, {culprit.name}, '
                    f'{culprit.runs} runs'
                )
            )
            print(
                f'| {operator} | {kind} | {"yes" if is_named else "**no**"} | '
                f'{", ".join(alone)} | {text} |',
                flush=True,
            )
            step = sample_step(config, accelerator)
    print(f'\n{named} of {total} named')


def run_right(accelerator: Accelerator) -> None:
    """Run all shipped configs with right kernels, and three with kernels that round otherwise."""
    configs = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / 'configs').rglob('*.py'))
        if '_base_' not in path.parts
    ]
    alarms = 0
    for config in configs:
        start = time.perf_counter()
        comparison = compare_step(sample_step(config, accelerator), accelerator)
        calls = sum(operator.calls for operator in comparison.operators.values())
        alarms += len(comparison.wrong)
        seconds = time.perf_counter() - start
        print(
            f'{config}: {calls} calls of {len(comparison.operators)} operators, accused: '
            f'{list(comparison.wrong) or "none"}, {seconds:.0f} s',
            flush=True,
        )
    print(f'{len(configs)} configs, {alarms} false alarms')
    products = (
        'convolution',
        'convolution_backward',
        'addmm',
        'mm',
        'bmm',
        'native_layer_norm',
        'native_batch_norm',
        'gelu',
        '_log_softmax',
        'upsample_bilinear2d',
        'add.Tensor',
    )
    for config in (DEMO, VIT, EOMT):
        step = sample_step(config, accelerator)
        with ExitStack() as stack:
            for operator in products:
                stack.enter_context(planted(operator, other_rounding))
            comparison = compare_step(step, accelerator)
        print(
            f'{config} with {len(products)} operators that round otherwise, accused: '
            f'{list(comparison.wrong) or "none"}',
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--configs-only', action='store_true')
    parser.add_argument('--kernels-only', action='store_true')
    options = parser.parse_args()
    accelerator = resolve_accelerator('sim')
    if not options.configs_only:
        run_planted(accelerator)
    if not options.kernels_only:
        run_right(accelerator)


if __name__ == '__main__':
    main()
