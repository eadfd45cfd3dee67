"""A frozen DINOv3 of two blocks with a linear head, for tests of feature sources."""

# To be added to the tiny config, whose pipeline is random.
FROZEN = """
model.update(
    data_preprocessor=dict(type='SegDataPreProcessor', bgr_to_rgb=True, pad_val=0,
                           seg_pad_val=255, size=(64, 64)),
    backbone=dict(type='DINOv3ViT', frozen=True, out_indices=(0, 1),
                  arch=dict(embed_dims=96, num_layers=2, num_heads=3, feedforward_channels=192)),
    decode_head=dict(
        type='LinearHead', in_channels=[96, 96], in_index=[0, 1],
        input_transform='resize_concat', channels=192, dropout_ratio=0, num_classes=7,
        norm_cfg=dict(type='BN'), align_corners=False, loss_decode=dict(type='CrossEntropyLoss')))
"""
# without what is random
PLAIN = FROZEN + 'del train_pipeline[2:4]\n'
