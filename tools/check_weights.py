"""Check a DINOv3 weight file: its format, variant, training data, keys and features.

The program is mapsage/commands/check_weights.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.commands.check_weights')
