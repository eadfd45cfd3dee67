"""List the configs that come with MapSage, or copy them into a folder to change them.

The program is mapsage/commands/list_configs.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.commands.list_configs')
