"""Start the ranks of a training with torchrun; if ranks fail, print the cause last.

The program is mapsage_launcher/launch.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage_launcher.launch')
