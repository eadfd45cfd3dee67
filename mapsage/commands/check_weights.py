"""Check a DINOv3 weight file: its format, variant, training data, keys and features.

    python tools/check_weights.py FILE_OR_FOLDER [--arch large] [--image 000000039769.jpg]

With --image (http://images.cocodataset.org/val2017/000000039769.jpg) the features are compared with
the published features. The exit status is 1 if the file or its features are wrong.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Optional, Sequence

if TYPE_CHECKING:
    from mapsage.models.backbones.dinov3_reference import DINOv3ViT

# As in mapsage.models.backbones.dinov3_weights and dinov3_reference, which import PyTorch.
_ARCHS = ('small', 'small+', 'base', 'large', 'huge+', '7B')
_IMAGE = 'http://images.cocodataset.org/val2017/000000039769.jpg'


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = argparse.ArgumentParser(description='Check a DINOv3 weight file.')
    parser.add_argument(
        'checkpoint', help='hub file, safetensors file, Hugging Face folder or timm file'
    )
    parser.add_argument(
        '--arch', choices=_ARCHS, help='variant of the model (default: recognized from the file)'
    )
    parser.add_argument('--image', help=f'path of {_IMAGE}, to compare its features')
    args = parser.parse_args(argv)
    from mapsage.models.backbones import dinov3_reference as reference
    from mapsage.models.backbones import dinov3_weights as weights

    state = weights.read_checkpoint(args.checkpoint)
    arch = args.arch or weights.variant_of(weights.convert(state))
    data, source = weights.training_data(args.checkpoint, state, weights.ARCHS[arch])
    cfg = dict(type='Pretrained', checkpoint=args.checkpoint)
    model = reference.DINOv3ViT(
        arch,
        out_indices=(weights.ARCHS[arch].num_layers - 1,),
        normalization=data or 'web',
        init_cfg=cfg,
    )
    model.init_weights()
    count = sum(parameter.numel() for parameter in model.parameters())
    print(
        f'{args.checkpoint}\n  format        {weights.detect_format(state)}, {len(state)} keys, '
        f'each accounted for\n  variant       {arch}, {count / 1e6:.1f} M parameters\n'
        f'  trained on    {data or "unknown: set normalization in the config"} ({source})'
    )
    if not args.image:
        print('  features      not compared: give --image')
        return 0
    return compare(model, f'{arch} {data or "web"}', args.image)


def compare(model: DINOv3ViT, name: str, path: str) -> int:
    """Print the comparison with the published features; return the exit status."""
    import cv2

    from mapsage.models.backbones import dinov3_reference as reference
    from mapsage.models.backbones.dinov3_weights import WeightsError

    if name not in reference.PUBLISHED:
        print(f'  features      none are published for {name}')
        return 0
    image = cv2.imread(path)
    if image is None:
        raise WeightsError(f'{path} cannot be read as an image')
    best = reference.compare(model, name, image[..., ::-1])[0]
    is_equal = best.difference <= reference.TOLERANCE
    print(
        f'  features      {"as published" if is_equal else "NOT as published"}: off by at most '
        f'{best.difference:.2g} (allowed {reference.TOLERANCE:g}), normalized as '
        f'{best.normalization}'
    )
    if not is_equal:
        print(f'    published   {reference.PUBLISHED[name]}\n    here        {best.computed}')
    return 0 if is_equal else 1


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
