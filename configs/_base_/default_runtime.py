"""Settings that all runs share: MapSage's runner, the device, logging, hooks, testing.

Lengths are counted in optimizer steps. A config that trains for another length overrides
``train_cfg``, ``param_scheduler`` and the intervals.
"""

default_scope = 'mmseg'
custom_imports = dict(imports=['mapsage'])
runner_type = 'MapSageRunner'

env_cfg = dict(
    accelerator='auto',  # auto, cuda, gcu, gcu_t20, xla, cpu, sim
    use_model_parallel=None,  # None: automatic; True or False: required
    dist_cfg=dict(backend='auto', timeout=1800),  # in seconds
    mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
)

vis_backends = [dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')]
visualizer = dict(type='SegLocalVisualizer', vis_backends=vis_backends, name='visualizer')
log_processor = dict(by_epoch=False)
log_level = 'INFO'
load_from = None
resume = False

train_cfg = dict(type='IterBasedTrainLoop', max_iters=80000, val_interval=8000)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
tta_model = dict(type='SegTTAModel')

default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=50, log_metric_by_epoch=False),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(
        type='CheckpointHook', by_epoch=False, interval=8000, max_keep_ckpts=2, save_best='mIoU'
    ),
    sampler_seed=dict(type='DistSamplerSeedHook'),
)
