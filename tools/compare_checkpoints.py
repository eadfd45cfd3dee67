"""Compare the weights of two checkpoints of one model.

The program is mapsage/commands/compare_checkpoints.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.commands.compare_checkpoints')
