"""Print which pixels a model was trained on.

The program is mapsage/commands/passport.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.commands.passport')
