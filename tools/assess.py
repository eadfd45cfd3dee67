"""How right is a map: areas and accuracies with intervals, from a labeled random sample.

The program is mapsage/extras/assess/assess.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.extras.assess.assess')
