"""Tell whether a training would start here, and the reasons. Exit status 0 if it would.

The program is mapsage/commands/doctor/__init__.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.commands.doctor')
