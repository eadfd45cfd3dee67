"""Choose the windows to label next, or windows whose labels a confident model contradicts.

The program is mapsage/extras/labels/suggest_labels.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.extras.labels.suggest_labels')
