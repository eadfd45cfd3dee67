"""Compare PMTHead with the authors' code: ``PYTHONPATH=tests python tests/compare_pmt.py PATH``.

PATH is a clone of tue-mps/pmt at 54d73c9. Their decoder gets random weights, which PMTHead
reads under their names; both get the same features. It prints the largest difference of the logits
of every output and fails above 1e-5. The authors' file needs transformers and timm; of the latter
only a norm, which is put in its place where timm is not installed.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from mask_models import build, pmt_config

from mapsage.extras.mask_transformers.query_head import ChannelNorm

TOLERANCE = 1e-5
DIMS, HEADS, BLOCKS, QUERIES, CLASSES, GRID = 32, 2, 2, 9, 5, 6


def authors_model(checkout: Path) -> Any:
    """Return their decoder and norms as one module with the names of a checkpoint."""
    if importlib.util.find_spec('timm') is None:
        timm, layers = ModuleType('timm'), ModuleType('timm.layers')
        layers.LayerNorm2d = ChannelNorm  # type: ignore[attr-defined]
        sys.modules.update({'timm': timm, 'timm.layers': layers})
    sys.path.insert(0, str(checkout / 'image'))
    from models.pmd import PlainMaskDecoder  # type: ignore[import-not-found]

    network = torch.nn.Module()
    network.decoder = PlainMaskDecoder(
        embed_dim=DIMS,
        hidden_dim=DIMS,
        num_prefix_tokens=5,
        grid_size=(GRID, GRID),
        patch_size=(16, 16),
        num_classes=CLASSES,
        num_q=QUERIES,
        num_blocks=BLOCKS,
        interaction_indices=[0, 1, 2, 3],
        num_heads=HEADS,
    )
    network.bn = torch.nn.ModuleList(torch.nn.BatchNorm1d(DIMS) for _ in range(4))
    for tensor in network.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) * 0.4 + (0.1 if tensor.dim() == 1 else -0.2))
    network.decoder.attn_mask_probs.fill_(1.0)
    whole = torch.nn.Module()
    whole.network = network
    return whole.eval()


def main() -> int:
    torch.manual_seed(0)
    theirs = authors_model(Path(sys.argv[1]))
    with tempfile.NamedTemporaryFile(suffix='.pth') as file:
        torch.save(dict(state_dict=theirs.state_dict()), file.name)
        model = build(pmt_config(init_cfg=dict(type='Pretrained', checkpoint=file.name)))
        model.decode_head.init_weights()
    head = model.decode_head.eval()
    tokens = [torch.randn(2, 5 + GRID * GRID, DIMS) for _ in range(4)]
    prefixes = [each[:, :5].transpose(1, 2)[..., None] for each in tokens]
    maps = [each[:, 5:].transpose(1, 2).reshape(2, DIMS, GRID, GRID) for each in tokens]
    sine, cosine = head.rope(GRID, GRID)
    with torch.no_grad():
        own = head([*maps, *prefixes])
        normed = [
            norm(each.transpose(1, 2)).transpose(1, 2)
            for norm, each in zip(theirs.network.bn, tokens)
        ]
        expected = theirs.network.decoder(normed, (cosine[5:], sine[5:]))
    worst = 0.0
    for output, (masks, classes) in enumerate(zip(*expected)):
        differences = (
            (own[output].masks - masks).abs().max(),
            (own[output].classes - classes).abs().max(),
        )
        print(
            f'output {output}: masks {differences[0]:.2e} of {masks.std():.2f}, classes '
            f'{differences[1]:.2e} of {classes.std():.2f}'
        )
        worst = max(worst, *map(float, differences))
    print('equal' if worst < TOLERANCE else f'different: {worst:.2e}')
    return int(worst >= TOLERANCE)


if __name__ == '__main__':
    sys.exit(main())
