"""NWPU VHR-10 with labels for 40 of 160 images, and nothing else: what FixMatch is compared with.

Command:  MAPSAGE_NWPU=<folder> python tools/train.py configs/nwpu/efficientnet_lite0_fpn_nwpu_40.py
Hardware: one CPU process on a 2-core AMD EPYC with other work, 188 s of processor
          time for the 267 steps (torch 2.13.0, 2026-11-23)
Score:    mIoU 43.8 (37.3 to 50.1) in one process, 267 steps of 4 labeled images
          (three seeds, other images labeled: docs/how-to/few-labels.md); not yet run at 8 ranks
"""

_base_ = './efficientnet_lite0_fpn_nwpu.py'

train_dataloader = dict(
    dataset=dict(
        _delete_=True,
        type='NamedSamples',
        names='{{ fileDirname }}/splits/labeled_40.txt',
        dataset={{_base_.train_dataloader.dataset}},
    )
)
