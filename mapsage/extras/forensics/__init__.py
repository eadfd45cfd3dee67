"""What a device computes, and how fast: its operators, wrong kernels, and options to try.

`operator_report.py` says which operators of a step a card leaves to the CPU, `kernels.py` names
those that are wrong, and `tuning/` measures which options make a step faster. All three are options
of `tools/doctor.py` (`doctor_options.py`). With ``env_cfg.cross_check`` another rank computes
gradients again (`cross_checks.py`), and `tools/train.py --replay` repeats one iteration.
"""
