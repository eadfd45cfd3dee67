"""How right a map is: areas and accuracies with standard errors, from a labeled random sample.

`census.py` reads a map once and `plan.py` draws points from it; `assessment.py` estimates from the
labeled points with the formulas of `estimators.py` and `intervals.py`. The room needs neither
PyTorch nor MMEngine. The command is `mapsage assess`, its page docs/how-to/assess.md.
"""
