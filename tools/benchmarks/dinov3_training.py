"""Training steps of DINOv3 + UPerNet in bfloat16: ours against transformers' backbone, one card.

    python tools/benchmarks/dinov3_training.py [--arch large] [--batch 8] [--steps 20]
        [--modes eager compile]

Frozen and full training, with and without torch.compile, each on random weights with the same head
in the same plain loop. Prints images a second, the share of the card's matmul rate (measured here,
bfloat16, square), and the memory in use at most.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any, List

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import torch  # noqa: E402
from _common import describe_machine  # noqa: E402
from dinov3_backbone import of_transformers  # noqa: E402
from mmseg.models import Feature2Pyramid, UPerHead  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from mapsage.accelerator import Accelerator, resolve_accelerator  # noqa: E402
from mapsage.models import DINOv3ViT  # noqa: E402
from mapsage.models.backbones.dinov3_weights import ARCHS, Arch  # noqa: E402

CLASSES = 7


class Reference(nn.Module):
    """transformers' backbone, frozen or not."""

    def __init__(self, arch: Arch, layers: List[int], frozen: bool) -> None:
        super().__init__()
        self.model, self._features = of_transformers(arch, layers)
        self.model.requires_grad_(not frozen)
        self.frozen = frozen

    def forward(self, x: torch.Tensor) -> List[torch.Tensor]:
        with torch.set_grad_enabled(not self.frozen):
            return self._features(x)


class Segmentor(nn.Module):
    """Backbone, pyramid, UPerNet and its loss."""

    def __init__(self, backbone: nn.Module, dims: int) -> None:
        super().__init__()
        norm = dict(type='BN')
        self.backbone = backbone
        self.neck = Feature2Pyramid(dims, norm_cfg=norm)
        self.head = UPerHead(
            in_channels=[dims] * 4,
            in_index=[0, 1, 2, 3],
            channels=512,
            num_classes=CLASSES,
            norm_cfg=norm,
            align_corners=False,
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.neck(self.backbone(x)))
        scores = nn.functional.interpolate(scores.float(), labels.shape[1:], mode='bilinear')
        return nn.functional.cross_entropy(scores, labels)


def matmul_rate(accelerator: Accelerator, side: int) -> float:
    """Return operations a second of square bfloat16 matrices, the best of five."""
    a, b = (
        torch.randn(side, side, device=accelerator.device(0), dtype=torch.bfloat16)
        for _ in range(2)
    )
    best = float('inf')
    for _ in range(5):
        accelerator.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            a @ b
        accelerator.synchronize()
        best = min(best, time.perf_counter() - start)
    return 10 * 2 * side**3 / best


def measure(
    accelerator: Accelerator, model: nn.Module, args: argparse.Namespace, compiled: bool
) -> Any:
    """Return images a second, operations a second, and MiB at most."""
    device = accelerator.device(0)
    model = model.to(device).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=6e-5)
    x = torch.randn(args.batch, 3, args.side, args.side, device=device)
    labels = torch.randint(0, CLASSES, (args.batch, args.side, args.side), device=device)

    def step(run: Any) -> None:
        with accelerator.autocast(torch.bfloat16):
            loss = run(x, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with FlopCounterMode(display=False) as counter:
        step(model)
    run = torch.compile(model) if compiled else model
    for _ in range(3):
        step(run)
    accelerator.synchronize()
    start = time.perf_counter()
    for _ in range(args.steps):
        step(run)
    accelerator.synchronize()
    each = (time.perf_counter() - start) / args.steps
    most = accelerator.max_memory_allocated()
    return (
        args.batch / each,
        counter.get_total_flops() / each,
        'unknown' if most is None else f'{most / 2**20:.0f}',
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--arch', default='large', choices=list(ARCHS))
    parser.add_argument('--side', type=int, default=512)
    parser.add_argument('--batch', type=int, default=8)
    parser.add_argument('--steps', type=int, default=20)
    parser.add_argument('--matrix', type=int, default=8192)
    parser.add_argument(
        '--modes', nargs='+', default=['eager', 'compile'], choices=['eager', 'compile']
    )
    parser.add_argument('--one', help='only one row, in a separate process: ours,frozen,eager')
    args = parser.parse_args()
    accelerator = resolve_accelerator('auto')
    if not args.one:
        print(
            f'{describe_machine()}, {accelerator.name}; {args.arch}, {args.side}x{args.side}, '
            f'batch {args.batch}, bfloat16, {args.steps} steps\n\n'
            '| backbone | training | mode | images/s | of the matmul rate | MiB at most |\n'
            '|---|---|---|---|---|---|',
            flush=True,
        )
        rows = [
            (side, training, mode)
            for training in ('frozen', 'full')
            for mode in args.modes
            for side in ('ours', 'transformers')
        ]
        import subprocess

        # The memory of one must not count for the next.
        failed = sum(
            subprocess.run(
                [sys.executable, *sys.argv, '--one', ','.join(row)], check=False
            ).returncode
            != 0
            for row in rows
        )
        sys.exit(failed and f'{failed} row(s) failed')
    side, training, mode = args.one.split(',')
    torch.manual_seed(0)
    arch = ARCHS[args.arch]
    ours = DINOv3ViT(args.arch, normalization=None, frozen=training == 'frozen')
    backbone = (
        ours if side == 'ours' else Reference(arch, list(ours.out_indices), training == 'frozen')
    )
    model = Segmentor(backbone, arch.embed_dims)
    rate = matmul_rate(accelerator, args.matrix)
    images, operations, most = measure(accelerator, model, args, mode == 'compile')
    print(
        f'| {side} | {training} | {mode} | {images:.2f} | {operations / rate:.0%} of '
        f'{rate / 1e12:.2f} T/s | {most} |',
        flush=True,
    )


if __name__ == '__main__':
    main()
