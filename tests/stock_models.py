"""Stock MMSegmentation models, shrunk in width and depth only."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import mmseg
from mmengine.config import Config

BASE = Path(mmseg.__file__).parent / '.mim' / 'configs' / '_base_' / 'models'
NUM_CLASSES = 7


def stock_model(name: str) -> Dict[str, Any]:
    """Return the config of 'resnet_fcn', 'vit_upernet' or 'segformer' for 64x64 tiles."""
    file, change = {
        'resnet_fcn': ('fcn_r50-d8.py', _resnet_fcn),
        'vit_upernet': ('upernet_vit-b16_ln_mln.py', _vit_upernet),
        'segformer': ('segformer_mit-b0.py', _segformer)}[name]
    model = Config.fromfile(str(BASE / file)).model
    model.pretrained = None
    model.data_preprocessor.size = (64, 64)
    for head in ('decode_head', 'auxiliary_head'):
        if model.get(head):
            model[head].num_classes = NUM_CLASSES
            model[head].dropout_ratio = 0.1
    change(model)
    return model.to_dict()


def _resnet_fcn(model: Any) -> None:
    model.backbone.update(depth=18, base_channels=8)
    model.decode_head.update(in_channels=64, channels=16)
    model.auxiliary_head.update(in_channels=32, channels=16)


def _vit_upernet(model: Any) -> None:
    model.backbone.update(img_size=(64, 64), embed_dims=32, num_layers=4, num_heads=4,
                          out_indices=(0, 1, 2, 3), drop_path_rate=0.1)
    model.neck.update(in_channels=[32] * 4, out_channels=32)
    model.decode_head.update(in_channels=[32] * 4, channels=16)
    model.auxiliary_head.update(in_channels=32, channels=16)


def _segformer(model: Any) -> None:
    model.backbone.update(embed_dims=8, num_layers=[1, 1, 1, 1], num_heads=[1, 2, 4, 8])
    model.decode_head.update(in_channels=[8, 16, 32, 64], channels=16)
