"""List a step's operators: where a card computes them, and which are wrong.

The program is mapsage/extras/forensics/list_operators.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.extras.forensics.list_operators')
