"""Memory of a DINOv3 backbone's weights, gradients and AdamW state: trained as a whole, with LoRA.

    python tools/benchmarks/lora_memory.py [--arch base] [--rank 16] [--targets q v]

Bytes are counted over the tensors that exist after one step. Activations come on top.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mapsage.models import DINOv3ViT  # noqa: E402


def mebibytes(tensors) -> float:
    return sum(each.numel() * each.element_size() for each in tensors) / 2**20


def measure(arch: str, lora) -> list:
    """Return the MiB of weights, gradients and optimizer state after a step."""
    model = DINOv3ViT(arch, normalization=None, lora=lora)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    sum(level.mean() for level in model(torch.randn(1, 3, 64, 64))).backward()
    optimizer.step()
    states = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    ]
    return [
        mebibytes(model.parameters()),
        mebibytes(each.grad for each in trained),
        mebibytes(states),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--arch', default='base', help='variant of DINOv3ViT (default: base)')
    parser.add_argument('--rank', type=int, default=16, help='rank of the adapters (default: 16)')
    parser.add_argument(
        '--targets', nargs='+', default=['q', 'v'], help='layers that get adapters (default: q v)'
    )
    args = parser.parse_args()
    lora = dict(rank=args.rank, targets=tuple(args.targets))
    whole, adapted = measure(args.arch, None), measure(args.arch, lora)
    print('| MiB | weights | gradients | AdamW | sum | ratio |\n|---|---|---|---|---|---|')
    for name, row in (('trained as a whole', whole), (f'LoRA, rank {args.rank}', adapted)):
        print(
            f'| {name} | '
            + ' | '.join(f'{each:,.1f}' for each in (*row, sum(row)))
            + f' | {sum(row) / sum(whole):.3f} |'
        )


if __name__ == '__main__':
    main()
