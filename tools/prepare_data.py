"""Write LoveDA, Potsdam, Vaihingen or iSAID from their archives in MMSegmentation's layout.

The program is mapsage/extras/demo/prepare_data.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.extras.demo.prepare_data')
