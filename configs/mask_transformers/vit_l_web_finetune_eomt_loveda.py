"""EoMT: DINOv3 ViT-L (web images) fine-tuned with mask queries, on LoveDA.

Command:  MAPSAGE_DINOV3=<folder of weights> bash scripts/start_8card_training.sh \
              configs/mask_transformers/vit_l_web_finetune_eomt_loveda.py
Hardware: 8 accelerators, 2 crops of 512x512 each (the published batch of 16). If memory is
          short, set model.backbone.with_cp=True
Score:    not yet run. Nobody has published EoMT or PMT on this data, and with few classes mask
          queries may gain nothing over heads per pixel. To hold against: UPerNet on the same
          frozen encoder 53.72 web / 51.98 sat mIoU on val (whu-pzhang/dinov3_geo)
"""

_base_ = [
    '../_base_/default_runtime.py',
    '../_base_/datasets/loveda.py',
    '../_base_/dinov3_vit_l_eomt.py',
]

train_cfg = dict(max_iters=20000, val_interval=4000)  # the length of the base's phases
default_hooks = dict(checkpoint=dict(interval=4000))
randomness = dict(seed=0)
