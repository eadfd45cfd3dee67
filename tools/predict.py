"""Predict maps of images and scenes of any size: on one device, or as one rank of a launcher.

The program is mapsage/commands/predict.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.commands.predict')
