"""The launcher: the command `mapsage`, and the process that starts the ranks of a job.

Importing this package must stay cheap: it imports only the standard library, and PyTorch inside
the functions that need it. `import mapsage` takes seconds, and a typing error in a command line has
to be reported before. The package `mapsage` imports modules from here, never the other way around.

Start reading at `command.py` (the words of the command line) or `launch.py` (how ranks start).
"""
