"""PMT: a frozen DINOv3 ViT-L (satellite images) with a decoder of mask queries, on iSAID.

Command:  MAPSAGE_DINOV3=<folder of weights> bash scripts/start_8card_training.sh \
              configs/mask_transformers/vit_l_sat_frozen_pmt_isaid.py
Hardware: 8 accelerators, 2 crops of 896x896 each (the published batch of 16)
Score:    not yet run. Nobody has published EoMT or PMT on this data, and with few classes mask
          queries may gain nothing over heads per pixel. To hold against: MMSeg's HRNet-W48
          reaches 67.8 mIoU on val

Mean and std of the weights are found from the file and logged; published EoMT and PMT have web
weights.
"""

_base_ = [
    '../_base_/default_runtime.py',
    '../_base_/datasets/isaid.py',
    '../_base_/dinov3_vit_l_pmt.py',
]

model = dict(
    data_preprocessor=dict(size=(896, 896)),
    backbone=dict(
        init_cfg=dict(
            checkpoint='{{$MAPSAGE_DINOV3:weights}}/dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth'
        )
    ),
    decode_head=dict(num_classes=16),
    test_cfg=dict(crop_size=(896, 896), stride=(597, 597)),
)
train_cfg = dict(max_iters=20000, val_interval=4000)  # the length of the base's phases
default_hooks = dict(checkpoint=dict(interval=4000))
randomness = dict(seed=0)
