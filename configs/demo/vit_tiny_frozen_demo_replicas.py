"""vit_tiny_frozen_demo with head replicas: two ranks hold each copy of the head, and two encode.

Command:  NPROC_PER_NODE=6 ENCODERS=2 bash scripts/start_8card_training.sh \
              configs/demo/vit_tiny_frozen_demo_replicas.py
Hardware: 4 head ranks and 2 encoder ranks on a 2-core AMD EPYC with much other work, 200 steps in
          52 s (torch 2.13.0, 2026-11-22)
Score:    mIoU 27.4; vit_tiny_frozen_demo, with three heads of one rank, has 27.6. A head of 7,000
          weights gains nothing from being split; this config only shows how to do it
"""

_base_ = './vit_tiny_frozen_demo.py'

# Besides the encoders, any even number of ranks can train. Each two of them train one copy.
feature_source = dict(type='Streamed', encoders=2, ranks_per_head=2)
