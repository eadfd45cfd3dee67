"""DINOv3ViT against transformers' DINOv3 and timm's (where installed), 512x512, CPU, in turns.

    OMP_NUM_THREADS=1 python tools/benchmarks/dinov3_backbone.py [--arch small] [--rounds 9]

Same random weights in each, four outputs, batch 1; forward alone without gradients, and forward
with backward. Outputs are compared before anything is timed.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import torch  # noqa: E402
from _common import describe_machine  # noqa: E402
from torch import nn  # noqa: E402

from mapsage.models import DINOv3ViT  # noqa: E402
from mapsage.models.backbones import dinov3_weights as weights  # noqa: E402

Features = Callable[[torch.Tensor], List[torch.Tensor]]
TIMM = {
    'small': 'vit_small_patch16_dinov3_qkvb',
    'base': 'vit_base_patch16_dinov3_qkvb',
    'large': 'vit_large_patch16_dinov3_qkvb',
}


def of_transformers(arch: weights.Arch, layers: List[int]) -> Any:
    """Return its model and its features as maps."""
    import transformers

    model = transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(
            hidden_size=arch.embed_dims,
            num_hidden_layers=arch.num_layers,
            num_attention_heads=arch.num_heads,
            intermediate_size=arch.feedforward_channels,
            use_gated_mlp=arch.gated_mlp,
            hidden_act='silu' if arch.gated_mlp else 'gelu',
            num_register_tokens=arch.num_registers,
            query_bias=arch.qkv_bias,
            value_bias=arch.qkv_bias,
            attn_implementation='sdpa',
        )
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)

    def features(x: torch.Tensor) -> List[torch.Tensor]:
        states = model(x, output_hidden_states=True).hidden_states
        return [as_map(model.norm(states[layer + 1]), arch, x) for layer in layers]

    return model, features


def of_timm(name: str, state: weights.State, layers: List[int]) -> Any:
    """Return timm's model with the weights of transformers' state dict, and its features."""
    import timm

    model = timm.create_model(TIMM[name], dynamic_img_size=True)
    model.load_state_dict(timm_names(state), strict=False)
    return model, lambda x: model.forward_intermediates(
        x, indices=layers, norm=True, intermediates_only=True
    )


def timm_names(state: weights.State) -> weights.State:
    """Our names are timm's but for these."""
    renames = {'register_tokens': 'reg_token', 'patch_embed.': 'patch_embed.proj.'}
    named = {}
    for key, value in weights.convert(state).items():
        for ours, theirs in renames.items():
            key = key.replace(ours, theirs)
        named[key] = value
    return named


def as_map(tokens: torch.Tensor, arch: weights.Arch, x: torch.Tensor) -> torch.Tensor:
    """Return the patches of (1, tokens, C) as (1, C, H / 16, W / 16)."""
    patches = tokens[:, 1 + arch.num_registers :].transpose(1, 2)
    return patches.reshape(len(x), -1, x.shape[2] // 16, x.shape[3] // 16)


def forward(features: Features, x: torch.Tensor) -> None:
    """Compute without gradients."""
    with torch.no_grad():
        features(x)


def forward_backward(features: Features, x: torch.Tensor) -> None:
    """Compute with gradients of the weights."""
    sum(each.sum() for each in features(x)).backward()


def seconds(function: Callable[..., None], *arguments: Any) -> float:
    """Return the processor time of one call: other work on the machine counts less."""
    start = time.process_time()
    function(*arguments)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--arch', default='small', choices=list(weights.ARCHS))
    parser.add_argument('--side', type=int, default=512)
    parser.add_argument('--rounds', type=int, default=9)
    args = parser.parse_args()
    torch.manual_seed(0)
    arch = weights.ARCHS[args.arch]
    model = DINOv3ViT(args.arch, normalization=None)
    theirs, features = of_transformers(arch, list(model.out_indices))
    converted = weights.convert(theirs.state_dict())
    model.load_state_dict(weights.fit(converted, model.state_dict(), arch)[0])
    sides: Dict[str, Features] = {'DINOv3ViT': model, 'transformers': features}
    try:
        sides['timm'] = of_timm(args.arch, theirs.state_dict(), list(model.out_indices))[1]
    except (ImportError, KeyError) as error:
        print(f'without timm: {error}')
    x = torch.randn(1, 3, args.side, args.side)
    with torch.no_grad():
        expected = sides['DINOv3ViT'](x)
        for name, side in sides.items():
            off = max(float((a - b).abs().max()) for a, b in zip(expected, side(x)))
            print(f'{name}: largest difference to DINOv3ViT {off:.1e}')
    print(
        f'{describe_machine()}\narch {args.arch}, {args.side}x{args.side}, batch 1, processor '
        f'time, median of {args.rounds} rounds in turns, {torch.get_num_threads()} thread(s)'
    )
    print(
        '\n| | '
        + ' | '.join(sides)
        + ' | '
        + ' | '.join(f'{name} / DINOv3ViT' for name in list(sides)[1:])
        + ' |'
    )
    print('|---' * (2 * len(sides)) + '|')
    for label, function in (('forward', forward), ('forward and backward', forward_backward)):
        taken: Dict[str, List[float]] = {name: [] for name in sides}
        for number in range(args.rounds + 1):
            for name, side in sides.items():
                spent = seconds(function, side, x)
                if number:  # the first round warms up
                    taken[name].append(spent)
        own = taken['DINOv3ViT']
        ratios = [
            statistics.median(b / a for a, b in zip(own, taken[name])) for name in list(sides)[1:]
        ]
        print(
            f'| {label} | '
            + ' | '.join(f'{1000 * statistics.median(taken[name]):.0f} ms' for name in sides)
            + ' | '
            + ' | '.join(f'{ratio:.2f}' for ratio in ratios)
            + ' |'
        )


if __name__ == '__main__':
    main()
