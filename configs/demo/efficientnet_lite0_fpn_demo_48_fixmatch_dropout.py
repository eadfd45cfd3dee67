"""FixMatch on 48 of 600 tiles, with complementary channel dropout of the features (UniMatch V2).

Command:  bash scripts/start_8card_training.sh \
              configs/demo/efficientnet_lite0_fpn_demo_48_fixmatch_dropout.py
Hardware: 8 simulated cards on a 2-core AMD EPYC with much other work, the first 6 steps at 2.6 s a
          step (torch 2.13.0, 2026-11-23)
Score:    mIoU 77.4 (77.2 to 77.8) in one process, 253 steps of 4 labeled and 4 unlabeled tiles
          (three seeds, other tiles labeled: docs/how-to/few-labels.md); not yet run at 8 ranks
"""

_base_ = './efficientnet_lite0_fpn_demo_48_fixmatch.py'

custom_hooks = [dict(type='FixMatchHook', threshold=0.95, momentum=0.98, channel_dropout=True)]
