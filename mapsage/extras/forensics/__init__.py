"""What a device computes, and how fast: its operators, wrong kernels, and options to try.

`mapsage operators` says which operators of a step a card leaves to the CPU (`operator_report.py`),
and which are wrong (`kernels.py`). `mapsage tune` measures which options make a step faster. With
``env_cfg.cross_check`` another rank computes gradients again (`cross_checks.py`), and
`tools/train.py --replay` repeats one iteration.
"""
