"""Draw charts of a training's dynamic sampling over its iterations, and examples of samples.

The program is mapsage/commands/plot_sampling.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.commands.plot_sampling')
