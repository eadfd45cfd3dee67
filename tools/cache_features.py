"""Compute the frozen encoder's features of all training samples: one device, or one rank of many.

The program is mapsage/commands/programs/cache_features.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.commands.programs.cache_features')
