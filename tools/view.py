"""Show maps in a browser: scene and map under a swipe, classes, confidence, errors.

The program is mapsage/extras/viewer/view.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.extras.viewer.view')
