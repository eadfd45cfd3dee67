"""A run's data: the order of its samples, the loaders, and checks that name the file at fault.

`build.py` builds the loaders; `data_order.py` explains why a resumed run draws the same samples.
"""
