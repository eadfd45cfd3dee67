"""NWPU VHR-10 with labels for 16 of 160 images: FixMatch lets the other 144 teach.

Command:  MAPSAGE_NWPU=<folder> bash scripts/start_8card_training.sh \
              configs/nwpu/efficientnet_lite0_fpn_nwpu_16_fixmatch.py
Hardware: one CPU process on a 2-core AMD EPYC with other work, 210 s of processor
          time for the 131 steps (torch 2.13.0, 2026-11-23)
Score:    mIoU 19.0 (16.3 to 22.1) in one process, 131 steps of 4 labeled and 4 unlabeled images
          (three seeds, other images labeled: docs/how-to/few-labels.md); not yet run at 8 ranks
"""

_base_ = './efficientnet_lite0_fpn_nwpu_40_fixmatch.py'

labeled_names = '{{ fileDirname }}/splits/labeled_16.txt'
# On one rank an epoch is 36 steps.
train_dataloader = dict(
    dataset=dict(labeled=dict(names=labeled_names), unlabeled=dict(names=labeled_names))
)
