"""A tiny Prithvi with random weights on made crops of two sensors, to show that it trains.

docs/how-to/earth-encoders.md says where the published weights are, and which encoder is for what.

Command:  python tools/make_demo_data.py data/crops --stacks
          python tools/train.py configs/earth/prithvi_tiny_crops.py
Hardware: not yet run
Score:    not yet run
"""

_base_ = [
    '../_base_/default_runtime.py',
    '../_base_/datasets/crops.py',
    '../_base_/earth_linear.py',
]

# Prithvi takes one sensor, and of the bands of these files it knows three.
sensors = dict(s2=dict(_base_.sensors['s2'], bands=['B03', 'B04', 'B11']))
dataset = dict(sensors=dict(_delete_=True, **sensors))
train_dataloader = dict(dataset=dataset)
val_dataloader = dict(dataset=dataset)
test_dataloader = dict(dataset=dataset)
model = dict(
    data_preprocessor=dict(sensors=sensors),
    backbone=dict(
        type='PrithviEO', sensors=sensors, arch=dict(embed_dims=96, num_layers=4, num_heads=4)
    ),
)
train_cfg = dict(max_iters=300, val_interval=300)
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=150))
