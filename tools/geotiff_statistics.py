"""Print statistics of the bands of scenes, with mean and std in the form that a config takes.

The program is mapsage/commands/programs/geotiff_statistics.py.
"""
from _program import run

if __name__ == '__main__':
    run('mapsage.commands.programs.geotiff_statistics')
