"""Make the demo's data, or after its training the map of its scene.

The program is mapsage/extras/demo/demo.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.extras.demo.demo')
