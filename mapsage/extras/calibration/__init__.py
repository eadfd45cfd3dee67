"""Whether the probabilities of a model are the shares of correct pixels: a metric and its picture.

`calibration_metric.py` registers `CalibrationError`; `test_options.py` adds ``--calibration`` to
tools/test.py.
"""
