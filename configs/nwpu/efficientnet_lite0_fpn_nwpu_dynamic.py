"""NWPU VHR-10 with dynamic sampling: crops of background alone are dropped and drawn again.

Command:  MAPSAGE_NWPU=<folder> bash scripts/start_8card_training.sh \
          configs/nwpu/efficientnet_lite0_fpn_nwpu_dynamic.py
"""
_base_ = './efficientnet_lite0_fpn_nwpu.py'

custom_hooks = [
    dict(
        type='DynamicSamplingHook',
        score=dict(type='LabelScore', metric='class_entropy'),
        validity=dict(low=0.1),  # nats: an object on 2 % of the crop
        prefetch=True)
]
