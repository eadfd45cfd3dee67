"""The demo with labels for 16 of its 600 tiles, and nothing else: what FixMatch is compared with.

Command:  bash scripts/start_8card_training.sh configs/demo/efficientnet_lite0_fpn_demo_16.py
Hardware: not yet run over its 200 steps
Score:    mIoU 67.4 (66.4 to 68.0) in one process, 792 steps of 4 labeled tiles
          (three seeds, other tiles labeled: docs/how-to/few-labels.md); not yet run at 8 ranks
"""

_base_ = './efficientnet_lite0_fpn_demo_48.py'

train_dataloader = dict(dataset=dict(names='{{ fileDirname }}/splits/labeled_16.txt'))
