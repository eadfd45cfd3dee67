"""NWPU VHR-10 with labels for 40 of 160 images, and nothing else: what FixMatch is compared with.

Command:  MAPSAGE_NWPU=<folder> python tools/train.py configs/nwpu/efficientnet_lite0_fpn_nwpu_40.py
Hardware: not yet run over its 300 steps
Score:    not yet run
"""
_base_ = './efficientnet_lite0_fpn_nwpu.py'

train_dataloader = dict(
    dataset=dict(
        _delete_=True,
        type='NamedSamples',
        names='{{ fileDirname }}/splits/labeled_40.txt',
        dataset={{_base_.train_dataloader.dataset}}))
