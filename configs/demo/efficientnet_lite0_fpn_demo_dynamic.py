"""The demo with dynamic sampling: tiles of one class are dropped and drawn again.

Command:  bash scripts/start_8card_training.sh configs/demo/efficientnet_lite0_fpn_demo_dynamic.py
"""
_base_ = './efficientnet_lite0_fpn_demo.py'

custom_hooks = [
    dict(
        type='DynamicSamplingHook',
        score=dict(type='LabelScore', metric='class_entropy'),
        validity=dict(low=0.2))  # nats: a second class on 5 % of the tile
]
