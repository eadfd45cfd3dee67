"""The commands of `mapsage` and tools/: one module or package for each, its options and its work.

``main()`` parses the command line, starts devices and ranks where it needs them, and returns an
exit status; ``run()`` is the entry point. A help text imports the module, and neither PyTorch nor
NumPy: packages that take long are imported inside functions. Options that several commands share
are in `options.py`, what they mean for a config in `cli.py`, and configs and models without a run
in `configs.py`.
"""
