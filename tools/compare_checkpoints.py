"""Compare the weights of two checkpoints of one model.

The program is mapsage/extras/forensics/compare_checkpoints.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.extras.forensics.compare_checkpoints')
