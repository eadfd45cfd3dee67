"""Measure which options make a config's training step faster on this machine.

The program is mapsage/extras/forensics/tune.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.extras.forensics.tune')
