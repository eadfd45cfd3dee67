"""Measure the shift between two dates: two scenes, or two folders of images with equal names.

The program is mapsage/commands/measure_shift.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.commands.measure_shift')
