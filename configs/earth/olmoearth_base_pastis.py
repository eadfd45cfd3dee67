"""OlmoEarth v1.2 Base, fine-tuned with UPerNet on PASTIS-R: crops from 12 dates of two sensors.

Set MAPSAGE_PASTIS to a folder with train/ (folds 1 to 3) and val/ (fold 4), made from the arrays as
docs/how-to/earth-encoders.md says.

Data:     PASTIS-R, zenodo.org/records/5735646, 54 GB. License: Etalab 2.0 (check it there)
Weights:  hf download allenai/OlmoEarth-v1_2-Base weights.pth --local-dir weights
          (pip install huggingface_hub); another folder is MAPSAGE_EARTH
License:  OlmoEarth Artifact License (docs/how-to/earth-encoders.md says what it forbids)
Command:  bash scripts/start_8card_training.sh configs/earth/olmoearth_base_pastis.py
Hardware: not yet run
Score:    not yet run. U-TAE reaches 63.1 mIoU on fold 5 of PASTIS with all dates
"""

_base_ = [
    '../_base_/default_runtime.py',
    '../_base_/datasets/stacks.py',
    '../_base_/earth_upernet.py',
]

data_root = '{{$MAPSAGE_PASTIS:data/pastis}}'
max_iters = 20000
# The dataset reads bands by their number, because the files do not name them; the encoder needs the
# names, in the same order.
files = dict(
    s2=dict(scenes='s2/{place}_{date}.tif', bands=list(range(1, 11)), max_dates=12),
    s1=dict(scenes='s1/{place}_{date}.tif', bands=[1, 2], max_dates=12),
)
sensors = dict(
    s2=dict(
        bands=['B02', 'B03', 'B04', 'B05', 'B06', 'B07', 'B08', 'B8A', 'B11', 'B12'], max_dates=12
    ),
    s1=dict(bands=['VV', 'VH'], max_dates=12),
)
dataset = dict(
    sensors=files,
    labels='labels/{place}.tif',
    window=64,
    metainfo=dict(
        classes=(
            'background',
            'meadow',
            'soft winter wheat',
            'corn',
            'winter barley',
            'winter rapeseed',
            'spring barley',
            'sunflower',
            'grapevine',
            'beet',
            'winter triticale',
            'winter durum wheat',
            'fruits, vegetables, flowers',
            'potatoes',
            'leguminous fodder',
            'soybeans',
            'orchard',
            'mixed cereal',
            'sorghum',
        ),
        palette=[
            [127, 127, 127],
            [184, 90, 46],
            [242, 175, 60],
            [127, 122, 31],
            [148, 184, 46],
            [137, 242, 60],
            [41, 127, 31],
            [46, 184, 75],
            [60, 242, 156],
            [31, 127, 112],
            [46, 162, 184],
            [60, 156, 242],
            [31, 52, 127],
            [60, 46, 184],
            [137, 60, 242],
            [102, 31, 127],
            [184, 46, 177],
            [242, 60, 175],
            [127, 31, 62],
        ],
    ),
)
train_dataloader = dict(batch_size=4, dataset=dict(**dataset, data_root=data_root + '/train'))
val_dataloader = dict(dataset=dict(**dataset, data_root=data_root + '/val'))
test_dataloader = val_dataloader
model = dict(
    data_preprocessor=dict(sensors=sensors, size=(64, 64)),
    backbone=dict(
        type='OlmoEarth',
        sensors=sensors,
        patch_size=4,
        arch='base',
        init_cfg=dict(type='Pretrained', checkpoint='{{$MAPSAGE_EARTH:weights}}/weights.pth'),
    ),
    decode_head=dict(num_classes=19),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, begin=0, end=500, by_epoch=False),
    dict(type='PolyLR', power=1.0, eta_min=0.0, begin=500, end=max_iters, by_epoch=False),
]
train_cfg = dict(max_iters=max_iters, val_interval=max_iters // 10)
default_hooks = dict(checkpoint=dict(interval=max_iters // 10))
