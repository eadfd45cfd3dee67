"""Print statistics of the bands of scenes, with mean and std as a config needs them.

The program is mapsage/commands/geotiff_statistics.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.commands.geotiff_statistics')
