"""The commands behind the programs of tools/: one module or package for each command.

A command takes parsed options, starts devices and ranks where it needs them, and returns an exit
status. The options of each program are in `programs/`, the options that most of them share in
`cli.py`, and configs and models without a run in `configs.py`.
"""
