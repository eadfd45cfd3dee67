"""Schedule of the configs of change: 700 steps of AdamW, 20 of them a warm-up.

The learning rate falls until the last step, so a config with another number of steps has its own
``param_scheduler`` beside its own ``train_cfg``.
"""

max_iters = 700
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.01))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, begin=0, end=20, by_epoch=False),
    dict(type='PolyLR', power=0.9, eta_min=1e-5, begin=20, end=max_iters, by_epoch=False),
]
randomness = dict(seed=0)
