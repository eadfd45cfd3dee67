"""The demo with labels for 48 of its 600 tiles, and nothing else: what FixMatch is compared with.

Command:  bash scripts/start_8card_training.sh configs/demo/efficientnet_lite0_fpn_demo_48.py
Hardware: not yet run over its 200 steps
Score:    mIoU 78.5 (76.2 to 80.3) in one process, 792 steps of 4 labeled tiles
          (three seeds, other tiles labeled: docs/how-to/few-labels.md); not yet run at 8 ranks
"""

_base_ = './efficientnet_lite0_fpn_demo.py'

train_dataloader = dict(
    dataset=dict(
        _delete_=True,
        type='NamedSamples',
        names='{{ fileDirname }}/splits/labeled_48.txt',
        dataset={{_base_.train_dataloader.dataset}},
    )
)
