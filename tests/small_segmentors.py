"""MMSegmentation's own models, made small: their configs with fewer channels and layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import torch
from mmengine.structures import PixelData
from torch import nn

SIDE, CLASSES = 64, 5
# Without a pool to one pixel: BatchNorm over the two values that it leaves a batch of two makes
# rounding large.
POOLS = (2, 3, 6)
SMALL_HEAD = dict(num_classes=CLASSES, dropout_ratio=0.0, channels=8)
TWO_SMALL_HEADS = {
    f'{head}__{key}': value
    for head in ('decode_head', 'auxiliary_head')
    for key, value in SMALL_HEAD.items()
}


def predict_classes(count: int) -> None:
    """Let the models that are built from now on have ``count`` classes."""
    SMALL_HEAD['num_classes'] = count
    for head in ('decode_head', 'auxiliary_head'):
        TWO_SMALL_HEADS[f'{head}__num_classes'] = count


def stock(name: str, **changes: Any) -> nn.Module:
    """Build ``_base_/models/<name>.py`` of MMSegmentation with changes, always from one seed."""
    import mmseg
    from mmengine.config import Config
    from mmseg.registry import MODELS
    from mmseg.utils import register_all_modules

    register_all_modules()
    path = Path(mmseg.__file__).parent / '.mim' / 'configs' / '_base_' / 'models' / f'{name}.py'
    config = Config.fromfile(str(path))
    config.merge_from_dict(
        {f'model.{key.replace("__", ".")}': value for key, value in changes.items()}
    )
    config.model.data_preprocessor.size = (SIDE, SIDE)
    config.model.pretrained = None
    torch.manual_seed(0)
    return MODELS.build(config.model)


def resnet_fcn(**changes: Any) -> nn.Module:
    return stock(
        'fcn_r50-d8',
        backbone__depth=18,
        backbone__base_channels=8,
        backbone__stem_channels=8,
        decode_head__in_channels=64,
        auxiliary_head__in_channels=32,
        **{**TWO_SMALL_HEADS, **changes},
    )


def resnet_fcn_all_losses() -> nn.Module:
    lovasz = dict(type='LovaszLoss', reduction='none', loss_name='loss_lovasz')
    weighted = dict(
        type='CrossEntropyLoss', loss_name='loss_ce', class_weight=[1.0, 2.0, 1.0, 0.5, 1.0]
    )
    return resnet_fcn(
        decode_head__loss_decode=[weighted, lovasz],
        decode_head__sampler=dict(type='OHEMPixelSampler', thresh=0.7, min_kept=100),
        auxiliary_head__loss_decode=[lovasz, dict(type='DiceLoss', loss_name='loss_dice')],
    )


def vit_upernet() -> nn.Module:
    sizes = dict(in_channels=[16] * 4)
    return stock(
        'upernet_vit-b16_ln_mln',
        backbone__img_size=(SIDE, SIDE),
        backbone__embed_dims=16,
        backbone__num_layers=6,
        backbone__num_heads=2,
        backbone__out_indices=(1, 3, 4, 5),
        neck__in_channels=sizes['in_channels'],
        neck__out_channels=16,
        decode_head__in_channels=sizes['in_channels'],
        decode_head__pool_scales=POOLS,
        auxiliary_head__in_channels=16,
        **TWO_SMALL_HEADS,
    )


def segformer() -> nn.Module:
    return stock(
        'segformer_mit-b0',
        backbone__embed_dims=8,
        backbone__num_heads=[1, 2, 2, 4],
        backbone__drop_path_rate=0.0,
        decode_head__in_channels=[8, 16, 16, 32],
        **{f'decode_head__{key}': value for key, value in SMALL_HEAD.items()},
    )


def swin_upernet() -> nn.Module:
    channels = [8, 16, 32, 64]
    return stock(
        'upernet_swin',
        backbone__pretrain_img_size=SIDE,
        backbone__embed_dims=8,
        backbone__num_heads=[1, 1, 2, 2],
        backbone__window_size=2,
        backbone__drop_path_rate=0.0,
        decode_head__in_channels=channels,
        decode_head__pool_scales=POOLS,
        auxiliary_head__in_channels=channels[2],
        **TWO_SMALL_HEADS,
    )


def cascade_hrnet() -> nn.Module:
    """Two decode heads, of which the second reads the first's logits."""
    stages = {
        f'stage{i}': dict(
            num_modules=1,
            num_branches=i,
            block='BASIC',
            num_blocks=(1,) * i,
            num_channels=(4, 8, 12, 16)[:i],
        )
        for i in range(2, 5)
    }
    stages['stage1'] = dict(
        num_modules=1, num_branches=1, block='BOTTLENECK', num_blocks=(1,), num_channels=(8,)
    )
    head = dict(
        in_channels=[4, 8, 12, 16],
        in_index=(0, 1, 2, 3),
        channels=8,
        dropout_ratio=0,
        num_classes=CLASSES,
        input_transform='resize_concat',
        norm_cfg=dict(type='BN'),
        align_corners=False,
    )
    return stock(
        'ocrnet_hr18',
        backbone__extra=stages,
        decode_head=[
            dict(head, type='FCNHead', num_convs=1, concat_input=False, kernel_size=1),
            dict(head, type='OCRHead', ocr_channels=4),
        ],
    )


SMALL_SEGMENTORS = dict(
    resnet_fcn=resnet_fcn,
    resnet_fcn_all_losses=resnet_fcn_all_losses,
    vit_upernet=vit_upernet,
    segformer=segformer,
    swin_upernet=swin_upernet,
    cascade_hrnet=cascade_hrnet,
)


def batch() -> Dict[str, List[Any]]:
    from mmseg.structures import SegDataSample

    generator = torch.Generator().manual_seed(3)
    samples = []
    for _ in range(2):
        sample = SegDataSample(
            metainfo=dict(
                img_path='',
                img_shape=(SIDE, SIDE),
                ori_shape=(SIDE, SIDE),
                pad_shape=(SIDE, SIDE),
                padding_size=[0] * 4,
            )
        )
        labels = torch.randint(0, CLASSES, (1, SIDE // 8, SIDE // 8), generator=generator)
        labels = labels.repeat_interleave(8, 1).repeat_interleave(8, 2)
        labels[:, :4] = 255
        sample.gt_sem_seg = PixelData(data=labels)
        samples.append(sample)
    images = [
        torch.randint(0, 256, (3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
        for _ in range(2)
    ]
    return dict(inputs=images, data_samples=samples)
