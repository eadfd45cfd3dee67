"""tools/doctor.py: tells whether a training would start here, without training.

`diagnosis.py` is the whole report. Every other module checks one subject and returns `Finding`s
(`finding.py`): installed packages, environment variables, the config, samples of the data, step
times, the built run, and the ranks of a launcher.
"""
