"""Draw what dynamic sampling did during a training: charts over iterations, and samples.

The program is mapsage/commands/programs/plot_sampling.py.
"""
from _program import run

if __name__ == '__main__':
    run('mapsage.commands.programs.plot_sampling')
