"""`mapsage tune CONFIG`: which options make a training step faster on this machine.

`command.py` is the whole report. `options.py` says which options the config, torch and the device
allow, `bench.py` carries out steps, `race.py` compares them in pairs, and `workers.py` measures the
loader. Nothing is recommended whose gain does not exceed the spread of the measurement.
"""
