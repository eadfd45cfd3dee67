"""Evaluate a checkpoint: on one device, or as one rank of a launcher.

The program is mapsage/commands/test.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.commands.test')
