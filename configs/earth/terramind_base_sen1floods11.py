"""TerraMind Base, fine-tuned with UPerNet on Sen1Floods11: water from Sentinel-1 and Sentinel-2.

Set MAPSAGE_SEN1FLOODS11 to the folder HandLabeled, whose images and labels were put into train/ and
val/ by the published split.

Data:     gsutil -m rsync -r gs://sen1floods11/v1.1/data/flood_events/HandLabeled FOLDER; the split
          is in gs://sen1floods11/v1.1/splits/flood_handlabeled. License: to be looked up there
Weights:  hf download ibm-esa-geospatial/TerraMind-1.0-base TerraMind_v1_base.pt
          --local-dir weights (pip install huggingface_hub); another folder is MAPSAGE_EARTH
License:  Apache-2.0
Command:  bash scripts/start_8card_training.sh configs/earth/terramind_base_sen1floods11.py
Hardware: not yet run
Score:    not yet run. PANGAEA reports 90.6 mIoU for a frozen TerraMind Base
"""

_base_ = [
    '../_base_/default_runtime.py',
    '../_base_/datasets/stacks.py',
    '../_base_/earth_upernet.py',
]

data_root = '{{$MAPSAGE_SEN1FLOODS11:data/sen1floods11}}'
max_iters = 4000
# The dataset reads bands by their number, because the files do not name them; the encoder needs the
# names, in the same order.
files = dict(
    s2=dict(scenes='S2Hand/{place}_S2Hand.tif', bands=list(range(1, 14))),
    s1=dict(scenes='S1Hand/{place}_S1Hand.tif', bands=[1, 2]),
)
sensors = dict(
    s2=dict(
        bands=[
            'B01',
            'B02',
            'B03',
            'B04',
            'B05',
            'B06',
            'B07',
            'B08',
            'B8A',
            'B09',
            'B10',
            'B11',
            'B12',
        ]
    ),
    s1=dict(bands=['VV', 'VH']),
)
dataset = dict(
    sensors=files,
    labels='LabelHand/{place}_LabelHand.tif',
    window=512,
    metainfo=dict(classes=('land', 'water'), palette=[[200, 190, 160], [40, 90, 200]]),
)
train_dataloader = dict(dataset=dict(**dataset, data_root=data_root + '/train'))
val_dataloader = dict(dataset=dict(**dataset, data_root=data_root + '/val'))
test_dataloader = val_dataloader
model = dict(
    data_preprocessor=dict(sensors=sensors),
    backbone=dict(
        type='TerraMind',
        sensors=sensors,
        modalities=dict(s2='S2L1C', s1='S1GRD'),
        arch='base',
        init_cfg=dict(
            type='Pretrained', checkpoint='{{$MAPSAGE_EARTH:weights}}/TerraMind_v1_base.pt'
        ),
    ),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, begin=0, end=500, by_epoch=False),
    dict(type='PolyLR', power=1.0, eta_min=0.0, begin=500, end=max_iters, by_epoch=False),
]
train_cfg = dict(max_iters=max_iters, val_interval=max_iters // 10)
default_hooks = dict(checkpoint=dict(interval=max_iters // 10))
