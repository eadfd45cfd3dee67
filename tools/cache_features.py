"""Compute the frozen encoder's features of all training samples: one device, or one rank of many.

The program is mapsage/extras/streaming/cache_features.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.extras.streaming.cache_features')
