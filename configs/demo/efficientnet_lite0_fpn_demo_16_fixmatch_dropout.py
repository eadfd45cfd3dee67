"""FixMatch on 16 of 600 tiles, with complementary channel dropout of the features (UniMatch V2).

Command:  bash scripts/start_8card_training.sh \
              configs/demo/efficientnet_lite0_fpn_demo_16_fixmatch_dropout.py
Hardware: not yet run over its 200 steps
Score:    mIoU 71.1 (66.9 to 76.2) in one process, 253 steps of 4 labeled and 4 unlabeled tiles
          (three seeds, other tiles labeled: docs/how-to/few-labels.md); not yet run at 8 ranks
"""

_base_ = './efficientnet_lite0_fpn_demo_16_fixmatch.py'

custom_hooks = [dict(type='FixMatchHook', threshold=0.95, momentum=0.98, channel_dropout=True)]
