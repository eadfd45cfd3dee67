"""Memory of a training step of DINOv3 with a head: parameters with their state, and activations.

    OMP_NUM_THREADS=1 python tools/benchmarks/segmentor_memory.py [--arch large] [--side 512]

Parameters count 4 bytes each, and 12 more if they are trained: gradient and AdamW. Activations are
the bytes that the forward pass of one image, loss included, keeps for the backward pass, each
tensor once, in float32. A frozen encoder keeps none, and its features count as input. What kernels
need for a moment comes on top.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Dict, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import torch  # noqa: E402
from _common import describe_machine  # noqa: E402
from mask_heads_paired import CLASSES, config_of  # noqa: E402
from mmengine.structures import PixelData  # noqa: E402
from mmseg.structures import SegDataSample  # noqa: E402
from segmentors_compared import in_fork  # noqa: E402

from mapsage.accelerator import resolve_accelerator, set_current_accelerator  # noqa: E402
from mapsage.commands.cli import build_model  # noqa: E402

# Name, kind of model, whether the encoder is frozen.
ROWS: Tuple[Tuple[str, str, bool], ...] = (
    ('linear, frozen', 'linear', True),
    ('UPerNet 128, frozen', '128', True),
    ('UPerNet 512, frozen', '512', True),
    ('PMT, frozen', 'pmt', True),
    ('linear, fine-tuned', 'linear', False),
    ('UPerNet 512, fine-tuned', '512', False),
    ('EoMT, fine-tuned', 'eomt', False),
)


def model_config(kind: str, frozen: bool, arch: str, side: int) -> Any:
    """Return the config of a model."""
    cfg = config_of('512' if kind == 'linear' else kind, arch, side, Path())
    if kind == 'linear':
        dims = cfg.model.decode_head.in_channels[0]
        cfg.model.neck = None
        cfg.model.backbone.out_indices = cfg.model.backbone.out_indices[-1:]
        cfg.model.decode_head = dict(
            type='LinearHead',
            in_channels=dims,
            channels=dims,
            dropout_ratio=0.1,
            num_classes=CLASSES,
            norm_cfg=dict(type='SyncBN'),
            align_corners=False,
            loss_decode=dict(type='CrossEntropyLoss', avg_non_ignore=True),
        )
    if kind != 'eomt':
        cfg.model.backbone.frozen = frozen
    return cfg


def measure(kind: str, frozen: bool, arch: str, side: int) -> Dict[str, float]:
    """Return parameters in millions and MiB of their state and of activations."""
    torch.manual_seed(0)
    model = build_model(model_config(kind, frozen, arch, side)).train()
    sample = SegDataSample(metainfo=dict(img_shape=(side, side)))
    sample.gt_sem_seg = PixelData(data=torch.randint(0, CLASSES, (1, side, side)))
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: Dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no other gets its place
        return tensor

    # UPerNet pools to one pixel, and a batch norm wants more than one value.
    images = torch.rand(2 if kind.isdigit() else 1, 3, side, side) * 255
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        losses = model.loss(images, [sample] * len(images))
    del losses
    count = sum(each.numel() for each in model.parameters())
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    return dict(
        trained=trained / 1e6,
        state=(4 * count + 12 * trained) / 2**20,
        activations=sum(each.nbytes() for each in kept.values()) / 2**20 / len(images),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--arch', default='large', help='of DINOv3ViT (default: large)')
    parser.add_argument('--side', type=int, default=512, help='of an image, in pixels')
    args = parser.parse_args()
    torch.set_num_threads(1)
    set_current_accelerator(resolve_accelerator('cpu'))
    print(f'{describe_machine()}\n{args.arch}, {args.side} x {args.side}, float32')
    print('| | trained, M | parameters with their state, MiB | activations an image, MiB |')
    print('|---|---|---|---|', flush=True)
    for name, kind, frozen in ROWS:
        # A separate process gives back what it took.
        row = in_fork(lambda kind=kind, frozen=frozen: measure(kind, frozen, args.arch, args.side))
        print(
            f'| {name} | {row["trained"]:.1f} | {row["state"]:,.0f} | {row["activations"]:,.0f} |',
            flush=True,
        )


if __name__ == '__main__':
    main()
