"""Say whether a training would start here, and why or why not. Exit status 0 when it would.

The program is mapsage/commands/programs/doctor.py.
"""
from _program import run

if __name__ == '__main__':
    run('mapsage.commands.programs.doctor')
