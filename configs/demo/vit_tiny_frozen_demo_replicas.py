"""vit_tiny_frozen_demo with head replicas: two ranks hold each copy of the head, and two encode.

Command:  NPROC_PER_NODE=6 ENCODERS=2 bash scripts/start_8card_training.sh \
              configs/demo/vit_tiny_frozen_demo_replicas.py
Hardware: not yet run to its end
Score:    not yet run to its end; vit_tiny_frozen_demo reaches mIoU 27.6
"""
_base_ = './vit_tiny_frozen_demo.py'

# Any number of ranks beside the encoders that 2 divides: each two of them train one copy.
feature_source = dict(type='Streamed', encoders=2, ranks_per_head=2)
