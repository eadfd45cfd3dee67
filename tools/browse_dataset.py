"""Draw samples of a config's dataset with their labels as overlays, augmentation included.

The program is mapsage/commands/browse_dataset.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.commands.browse_dataset')
