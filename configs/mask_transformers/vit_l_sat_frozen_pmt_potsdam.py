"""PMT: a frozen DINOv3 ViT-L (satellite images) with a decoder of mask queries, on ISPRS Potsdam.

Command:  MAPSAGE_DINOV3=<folder of weights> bash scripts/start_8card_training.sh \
              configs/mask_transformers/vit_l_sat_frozen_pmt_potsdam.py
Hardware: 8 accelerators, 2 crops of 512x512 each (the published batch of 16)
Score:    not yet run. Nobody has published EoMT or PMT on this data, and with few classes mask
          queries may gain nothing over heads per pixel. To hold against: MMSeg's DeepLabV3+ with
          ResNet-101 reaches 78.7 mIoU on val with these classes

Mean and std of the weights are found from the file and logged; published EoMT and PMT have web
weights.
"""

_base_ = [
    '../_base_/default_runtime.py',
    '../_base_/datasets/potsdam.py',
    '../_base_/dinov3_vit_l_pmt.py',
]

model = dict(
    backbone=dict(
        init_cfg=dict(
            checkpoint='{{$MAPSAGE_DINOV3:weights}}/dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth'
        )
    ),
    decode_head=dict(num_classes=6),
)
train_cfg = dict(max_iters=20000, val_interval=4000)  # the length of the base's phases
default_hooks = dict(checkpoint=dict(interval=4000))
randomness = dict(seed=0)
