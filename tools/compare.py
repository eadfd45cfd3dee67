"""Compare runs: a table of scores, time and classes, and one HTML page with curves and settings.

The program is mapsage/commands/compare.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.commands.compare')
