"""Write the synthetic demo dataset, and a georeferenced scene to predict a map of.

The program is mapsage/extras/demo/make_demo_data.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.extras.demo.make_demo_data')
