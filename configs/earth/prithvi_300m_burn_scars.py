"""Prithvi-EO-2.0 300M TL, fine-tuned with UPerNet on HLS Burn Scars.

Set MAPSAGE_BURN_SCARS to the folder with training/ and validation/. Its files have reflectance in
0..1, which the preprocessor multiplies by 10000.

Data:     huggingface.co/datasets/ibm-nasa-geospatial/hls_burn_scars, an archive of 2.5 GB. License:
          CC-BY-4.0 (check it there)
Weights:  hf download ibm-nasa-geospatial/Prithvi-EO-2.0-300M-TL Prithvi_EO_V2_300M_TL.pt
          --local-dir weights (pip install huggingface_hub); another folder is MAPSAGE_EARTH
License:  Apache-2.0
Command:  bash scripts/start_8card_training.sh configs/earth/prithvi_300m_burn_scars.py
Hardware: not yet run
Score:    not yet run. GEO-Bench-2 reports 88.4 mIoU for this encoder
"""

_base_ = [
    '../_base_/default_runtime.py',
    '../_base_/datasets/stacks.py',
    '../_base_/earth_upernet.py',
]

data_root = '{{$MAPSAGE_BURN_SCARS:data/burn_scars}}'
max_iters = 4000
# The dataset reads bands by their number, because the files do not name them; the encoder needs the
# names, in the same order.
files = dict(hls=dict(scenes='{place}_merged.tif', bands=[1, 2, 3, 4, 5, 6]))
sensors = dict(hls=dict(bands=['B02', 'B03', 'B04', 'B8A', 'B11', 'B12']))
dataset = dict(
    sensors=files,
    labels='{place}.mask.tif',
    window=512,
    metainfo=dict(classes=('not burned', 'burn scar'), palette=[[120, 150, 90], [200, 60, 30]]),
)
train_dataloader = dict(dataset=dict(**dataset, data_root=data_root + '/training'))
val_dataloader = dict(dataset=dict(**dataset, data_root=data_root + '/validation'))
test_dataloader = val_dataloader
model = dict(
    data_preprocessor=dict(sensors=sensors, mean=dict(hls=[0.0] * 6), std=dict(hls=[1e-4] * 6)),
    backbone=dict(
        type='PrithviEO',
        sensors=sensors,
        arch='300M_TL',
        init_cfg=dict(
            type='Pretrained', checkpoint='{{$MAPSAGE_EARTH:weights}}/Prithvi_EO_V2_300M_TL.pt'
        ),
    ),
    neck=dict(embed_dim=1024),
    decode_head=dict(in_channels=[1024, 1024, 1024, 1024]),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, begin=0, end=500, by_epoch=False),
    dict(type='PolyLR', power=1.0, eta_min=0.0, begin=500, end=max_iters, by_epoch=False),
]
train_cfg = dict(max_iters=max_iters, val_interval=max_iters // 10)
default_hooks = dict(checkpoint=dict(interval=max_iters // 10))
